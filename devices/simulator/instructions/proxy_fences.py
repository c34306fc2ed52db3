"""Fences between the generic proxy and others (PTX ISA 9.7.13.4, `fence.proxy`)."""

from ..decoder import Decoder, Step, instruction
from ..groups import Group
from .control import nothing


@instruction("fence.proxy.async", "fence.proxy.async::generic")
def async_fence(d: Decoder) -> Step:
    """Makes stores that have happened before visible to the async proxy."""
    modifiers = d.modifiers
    one_way = modifiers.one_of("acquire", "release", default="")
    modifiers.ignore_prefixes("sync_restrict::")
    modifiers.ignore("cluster")
    space = modifiers.one_of("global", "shared::cta", "shared::cluster", default="")
    d.expect(0)
    races = d.machine.races
    mbarriers = d.machine.mbarriers
    if one_way == "acquire":
        return nothing

    def step(group: Group) -> None:
        if space != "global":
            mbarriers.publish(group.index)
        if races is not None:
            shared, globally = space != "global", space in ("", "global")
            races.fence_proxies(group.index, shared=shared, globally=globally)

    return step
