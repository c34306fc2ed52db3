"""Compiles composed kernels: through the cache, several at a time, for any device of the matrix.

No device has to be present: what is compiled for is a row of the matrix.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from humming import env, plugins, tuned
from humming.cache import (
    CacheEntry,
    KernelCache,
    Version,
    dotted,
    include_closure,
    kernel_key,
    kernel_recipe,
    key_version,
)
from humming.capability import DeviceCapabilities
from humming.composer import KernelPlan, compose, m_range_of, m_ranges, sized
from humming.decision import MRange
from humming.dtypes import DataType
from humming.errors import CompileError, PluginError, UnsupportedError, check_type
from humming.hookspecs import Compiler, Image
from humming.problem import GemmProblem, whole_number
from humming.quantize_kernel import ENTRY as QUANTIZE_ENTRY
from humming.quantize_kernel import (
    INPUTS,
    NOT_FUSED,
    check_quantizable,
    compose_quantize,
    plan_quantize,
)

_HOOK = "humming_compiler"


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel ready to be loaded by the runtime of its device.

    Attributes:
        image: the module image, with its kind and the compiler's log.
        entry: name of the kernel in it.
        key: cache key: a digest of all that the kernel is made of, and the compiler's version.
        compiler: what made it, such as "nvrtc 13.0". From a cache filled elsewhere it may be newer
            than the compiler of this host.
        seconds: time that this call took, compiling or reading from the cache.
        from_cache: whether it was read from the cache.
    """

    image: Image
    entry: str
    key: str
    compiler: str
    seconds: float
    from_cache: bool

    @property
    def log(self) -> str:
        """What the compiler said when it made the image."""
        return self.image.log


def compile_source(
    source: str,
    entry: str,
    caps: DeviceCapabilities,
    *,
    cache: bool | KernelCache = True,
    needs: Version | None = None,
) -> CompiledKernel:
    """Compiles a source for a device, or takes it from the cache.

    Args:
        source: CUDA source whose includes are all spelled `#include <humming/PATH>`.
        entry: the `extern "C"` kernel in it.
        caps: the device to compile for; it need not be present.
        cache: False compiles anew and keeps nothing; a `KernelCache` replaces the one of the
            environment. `HUMMING_DISABLE_CACHE=1` turns the environment's cache off.
        needs: the compiler version that something in the source needs, if any.

    A kernel that the cache holds needs no compiler here; one that a newer compiler made elsewhere
    serves too.

    Raises:
        CompileError: not in the cache and no compiler, or one that is too old; a bad include; or an
            error in the source.
        PluginError: the plugin that has the compiler is broken.
    """
    start = time.perf_counter()
    compiler = plugins.compiler_for(caps)
    name, options = identity(compiler, caps)
    headers = include_closure(source, plugins.registry().headers, name=f"{entry}.cu")
    recipe = kernel_recipe(source, headers, entry=entry, compiler=name, options=options)
    kernels = _cache(cache)
    stored, from_cache = kernels.find(recipe, _installed(compiler, caps)) if kernels else None, True
    if stored is None:
        key = kernel_key(recipe, _usable(compiler, entry, caps, needs, kernels))

        def build() -> CacheEntry:
            with plugins.calling(_HOOK, caps):
                image = _checked(compiler.compile(source, headers, entry, caps))
            return CacheEntry(key, entry, image.kind, image.data, image.log)

        stored, from_cache = kernels.load_or_build(key, build) if kernels else (build(), False)
    image = Image(kind=stored.kind, data=stored.data, log=stored.log)
    made_by = f"{name} {dotted(key_version(stored.key))}"
    took = time.perf_counter() - start
    return CompiledKernel(image, entry, stored.key, made_by, took, from_cache)


def compile_plan(plan: KernelPlan, *, cache: bool | KernelCache = True) -> CompiledKernel:
    """Compiles the kernel of a plan; arguments and errors as `compile_source`."""
    return compile_source(
        plan.source,
        plan.entry,
        plan.decision.capabilities,
        cache=cache,
        needs=plan.lowering.mma.min_compiler,
    )


def compile_many(
    plans: Sequence[KernelPlan], *, jobs: int | None = None, cache: bool | KernelCache = True
) -> list[CompiledKernel]:
    """Compiles the kernels of several plans at the same time, in the order of the plans.

    Args:
        plans: what to compile; equal kernels are compiled once if there is a cache.
        jobs: kernels in progress at a time; by default as `HUMMING_COMPILE_JOBS` says.
        cache: as for `compile_source`.

    Raises:
        CompileError: of the first plan that fails, once those in progress have ended.
    """
    jobs = env.compile_jobs() if jobs is None else whole_number("compile", "jobs", jobs)
    if jobs < 1:
        why = "no kernel would be in progress"
        raise UnsupportedError(f"compile with jobs={jobs}", why, "Give jobs of at least 1.")
    workers = min(jobs, len(plans))
    if workers <= 1:
        return [compile_plan(plan, cache=cache) for plan in plans]
    # Threads suffice: the compiler runs as native code without the interpreter lock.
    with ThreadPoolExecutor(workers, thread_name_prefix="humming-compile") as pool:
        futures = [pool.submit(compile_plan, plan, cache=cache) for plan in plans]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def compile(
    problem: GemmProblem | str,
    device: str | DeviceCapabilities | None = None,
    *,
    n: int | None = None,
    k: int | None = None,
    m: int | Iterable[int] | None = None,
    directory: Path | str | None = None,
    jobs: int | None = None,
) -> list[CompiledKernel]:
    """Compiles what a problem needs on a device ahead of time, without having the device.

    Args:
        problem: a problem, or the name of one together with `n` and `k`.
        device: a row of the matrix by name, capabilities, or None for the present device.
        n, k: sizes of the weight [n, k]; they replace those of a description.
        m: numbers of tokens to be ready for; None is ready for any.
        directory: a folder to fill instead of the cache of the environment. It serves as a cache
            wherever `HUMMING_CACHE_DIR` names it. Entries of tuned records that kernels were
            chosen by are put there, too, in place of those of an earlier time.
        jobs: kernels in progress at a time; by default as `HUMMING_COMPILE_JOBS` says.

    Returns:
        One kernel for each range of tokens that is planned for separately, and where activations
        are quantized those that do it.

    Raises:
        UnsupportedError: an unknown problem or device, or no lowering for it.
        CompileError: no compiler, one that is too old, or an error in a composed source.
    """
    problem, caps = sized(problem, n, k), plugins.capabilities(device)
    tokens = m if isinstance(m, Iterable) or m is None else [m]
    known = m_ranges(problem, caps)
    ranges = known if tokens is None else dict.fromkeys(m_range_of(m, known) for m in tokens)
    if directory is not None:
        how = "Give the path of a folder, or leave directory away."
        check_type("compile", "directory", directory, (str, Path), how)
    plans = [compose(problem, caps, m_range=m_range) for m_range in ranges]
    cache = True if directory is None else KernelCache(Path(directory))
    made = compile_many(plans, jobs=jobs, cache=cache)
    if directory is not None:
        _put_records(problem, caps, plans, Path(directory))
    if problem.activation.dtype.is_narrow:
        sources = _quantizing_sources(problem, caps, tokens)
        made += [compile_source(text, QUANTIZE_ENTRY, caps, cache=cache) for text in sources]
    return made


def _put_records(
    problem: GemmProblem, caps: DeviceCapabilities, plans: Sequence[KernelPlan], directory: Path
) -> None:
    """Has who is served by a folder choose the kernels that are in it: the entries that plans were
    made by are put there, and those of an earlier time go that would choose others."""
    record, row = tuned.user_record(caps.name, directory), tuned.row_of(caps.name)
    heeded = [plan.decision.record.entry for plan in plans if plan.decision.record]
    stale = []
    # What was measured on this machine is not for a compilation to remove.
    if record.absolute() != tuned.user_record(caps.name).absolute():
        key, ranges = tuned.ProblemKey.of(problem), [plan.m_range for plan in plans]
        stale = [
            place
            for place in tuned.kept_entries(record, row)
            if place[0] == key and any(_overlap(place[1], m_range) for m_range in ranges)
        ]
    if heeded or stale:
        tuned.merge_record(record, row, heeded, stale)


def _overlap(one: MRange, other: MRange) -> bool:
    ends = [high for _, high in (one, other) if high is not None]
    return max(one[0], other[0]) <= min(ends, default=max(one[0], other[0]))


def _quantizing_sources(
    problem: GemmProblem, caps: DeviceCapabilities, tokens: Iterable[int] | None
) -> Iterable[str]:
    """The kernels that quantize activations of a problem, from every type of input."""
    # Numbers of tokens of one length in bits share a kernel.
    sizes = range(1, 25) if tokens is None else {max(1, m).bit_length() for m in tokens}
    spec, k = problem.activation, problem.k
    check_quantizable(spec)
    plans = (
        plan_quantize(spec, DataType.parse(name), NOT_FUSED, k, 1 << size - 1, caps)
        for name in INPUTS
        for size in sizes
    )
    return dict.fromkeys(compose_quantize(p.config, caps, plugins.registry()) for p in plans)


def _cache(choice: bool | KernelCache) -> KernelCache | None:
    if isinstance(choice, KernelCache):
        return choice
    return KernelCache() if choice and env.cache_enabled() else None


def identity(compiler: Compiler, caps: DeviceCapabilities) -> tuple[str, tuple[str, ...]]:
    """Name and options of the compiler of a device, which need no compiler to be installed.

    Raises:
        PluginError: its plugin is broken.
    """
    with plugins.calling(_HOOK, caps):
        name, options = compiler.name, compiler.options(caps)
        if not isinstance(name, str):
            raise PluginError(f"the compiler's name = {name!r} is no text")
        if not isinstance(options, tuple) or not all(isinstance(text, str) for text in options):
            raise PluginError(f"the compiler's options are {options!r}, no tuple of texts")
    return name, options


def version_of(compiler: Compiler, caps: DeviceCapabilities) -> Version:
    """(major, minor) of the compiler of a device.

    Raises:
        CompileError: the compiler is not installed.
        PluginError: its plugin is broken.
    """
    with plugins.calling(_HOOK, caps):
        version = compiler.version
        if not (
            isinstance(version, tuple)
            and len(version) == 2
            and all(isinstance(number, int) for number in version)
        ):
            raise PluginError(f"the compiler's version = {version!r} is no (major, minor)")
    return version


def _installed(compiler: Compiler, caps: DeviceCapabilities) -> Version | None:
    try:
        return version_of(compiler, caps)
    except CompileError:
        return None  # kernels that were prepared elsewhere serve without it


def _usable(
    compiler: Compiler,
    entry: str,
    caps: DeviceCapabilities,
    needs: Version | None,
    kernels: KernelCache | None,
) -> Version:
    """The version of a compiler that is there and new enough."""
    try:
        version = version_of(compiler, caps)
    except CompileError as error:
        if kernels is None:
            raise
        raise CompileError(
            f"{entry} for {caps.name} is not in {kernels.directory}, and cannot be compiled here: "
            f"{error} Or fill that folder where there is a compiler, with `humming compile` of the "
            "same version of humming."
        ) from error
    required = max((v for v in (caps.min_compiler, needs) if v is not None), default=None)
    if required is not None and version < required:
        raise CompileError(
            f"{entry} for {caps.name} ({caps.arch}) needs {compiler.name} {dotted(required)} or "
            f"newer; found {dotted(version)}"
        )
    return version


def _checked(image: Any) -> Image:
    """What a compiler returned, if it is an image."""
    if not isinstance(image, Image):
        raise PluginError(f"compile returned {image!r} of type {type(image).__name__}, no Image")
    for name, kind in (("kind", str), ("data", bytes), ("log", str)):
        value = getattr(image, name)
        if not isinstance(value, kind):
            told = f"its {name} is of type {type(value).__name__}, not {kind.__name__}"
            raise PluginError(f"compile returned an image, but {told}")
    return image
