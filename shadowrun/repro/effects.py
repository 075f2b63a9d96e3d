"""The part of a script that shows what a call does to memory: plain torch, with guard memory around each input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.replay.effects import GUARD_BYTES

if TYPE_CHECKING:
    from shadowrun.intercept.plan import OpPlan

__all__ = ["COPY_GUARDED", "EFFECTS", "returned_arguments"]

COPY_GUARDED = '''

def copied(value, device, memory):
    """A copy of an argument, with memory around it that belongs to nobody."""
    if isinstance(value, list):
        return [copied(v, device, memory) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    storage, guard = value.untyped_storage(), torch.full((GUARD,), 0x3F, dtype=torch.uint8)
    key = storage.data_ptr(), str(device)
    if key not in memory:
        before = torch.cat([guard, torch.empty(0, dtype=torch.uint8).set_(storage), guard])
        memory[key] = before, before.to(device, copy=True)
    place = memory[key][1].untyped_storage()
    offset = GUARD // value.element_size() + value.storage_offset()
    return torch.empty(0, dtype=value.dtype, device=device).set_(place, offset, value.size(), value.stride())
'''.replace("GUARD", str(GUARD_BYTES))

EFFECTS = '''

def tensors(values):
    """Names and tensors, those in lists included."""
    for name, value in values.items():
        for i, t in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if isinstance(t, torch.Tensor) and t.numel():
                yield (f"{name}[{i}]" if isinstance(value, (list, tuple)) else name), t


def elements(memory, t):
    """The bytes of a tensor's elements, in the bytes of its storage."""
    size = t.element_size()
    strides = *[s * size for s in t.stride()], 1
    return memory.as_strided((*t.size(), size), strides, t.storage_offset() * size)


def effects(x, results, returned, memory):
    """What the call did to memory, as sentences: writes where the schema allows none, and memory that is shared."""
    found = []
    for before, after in memory.values():
        here = [(n, t) for n, t in tensors(x) if t.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()]
        changed = before != after.cpu()
        for name, t in here:
            if name.partition("[")[0] in WRITTEN:
                elements(changed, t).fill_(False)
        for name, t in here:
            wrong = elements(changed, t).flatten().nonzero().flatten().tolist()
            if wrong:
                found.append(f"{name} is an input only, and its bytes {wrong[0]} to {wrong[-1]} changed")
            elements(changed, t).fill_(False)
        wrong = changed.nonzero().flatten().tolist()
        if wrong and here:
            name, t = here[0]
            first = t.storage_offset() * t.element_size()
            found.append(f"beside {name}, bytes {wrong[0] - first} to {wrong[-1] - first} from its start changed")
        for name, t in tensors(results):
            if t.untyped_storage().data_ptr() == after.untyped_storage().data_ptr():
                found.append(f"{name} lies in the memory of {', '.join(n for n, _ in here)}")
    fresh = list(tensors(results))
    for i, (name, t) in enumerate(fresh):
        for other, u in fresh[i + 1 :]:
            if t.untyped_storage().data_ptr() == u.untyped_storage().data_ptr():
                found.append(f"{name} and {other} share memory")
    for name, t in returned.items():
        if t.data_ptr() != x[name].data_ptr():
            found.append(f"what comes back in the place of {name} lies in other memory")
    return found
'''


def returned_arguments(plan: OpPlan) -> dict[str, str]:
    """Expressions for what should be an argument that the call wrote to, by the argument's name."""
    schema, found = plan.func._schema, {}
    for i, value in enumerate(schema.returns):
        info = value.alias_info
        for a in schema.arguments:
            given = a.alias_info if str(a.type) == "Tensor" else None
            if info is not None and given is not None and given.is_write and given.before_set & info.before_set:
                found[a.name] = "out" if plan.n_returns == 1 else f"out[{i}]"
    return found
