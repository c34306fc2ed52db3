"""The devices of the CUDA driver, whoever made them."""

from typing import Any

from humming.errors import PluginError
from humming.hookspecs import PresentDevice


def present_devices() -> list[PresentDevice]:
    """Every device that the CUDA driver of this machine shows; none without a driver or device.

    Raises:
        PluginError: the driver is there and fails otherwise, or cuda-bindings is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise PluginError(f"cuda-bindings is not usable: {error}") from error
    if not _initialized(driver):
        return []
    count = _value(driver, driver.cuDeviceGetCount())
    return [_device(driver, index) for index in range(count)]


def _initialized(driver: Any) -> bool:
    try:
        (status,) = driver.cuInit(0)
    except Exception as error:
        # cuda-bindings finds libcuda on the first call; how it says that there is none has
        # changed between its versions (RuntimeError, DynamicLibNotFoundError).
        if isinstance(error, (OSError, RuntimeError)) or "NotFound" in type(error).__name__:
            return False
        raise
    absent = {
        driver.CUresult.CUDA_ERROR_NO_DEVICE,
        # The stub that toolkits install for linking.
        driver.CUresult.CUDA_ERROR_STUB_LIBRARY,
    }
    if status in absent:
        return False
    _value(driver, (status, None))
    return True


def _device(driver: Any, index: int) -> PresentDevice:
    handle = _value(driver, driver.cuDeviceGet(index))
    attribute = driver.CUdevice_attribute

    def read(which: Any) -> int | None:
        # Not every CUDA-compatible driver knows every attribute, and 0 stands for unknown.
        status, value = driver.cuDeviceGetAttribute(which, handle)
        return int(value) or None if status == driver.CUresult.CUDA_SUCCESS else None

    name = _value(driver, driver.cuDeviceGetName(256, handle))
    return PresentDevice(
        index=index,
        driver_name=name.split(b"\0")[0].decode(errors="replace").strip(),
        sms=read(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        l2_bytes=read(attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
        memory_bytes=int(_value(driver, driver.cuDeviceTotalMem(handle))),
    )


def _value(driver: Any, result: tuple[Any, ...]) -> Any:
    """The value of a driver call."""
    status, value = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise PluginError(f"the CUDA driver answered {status.name} ({int(status)})")
    return value
