"""Which candidate runs, and why each of the others does not."""

from __future__ import annotations

from collections.abc import Callable

from soup_flows.sharding.candidates import LEVELS, Case
from soup_flows.sharding.values import Candidate
from soup_flows.units import gib

SHARDING_MUST_SAVE = 0.25
"""Share of a step that more sharding must be expected to save before it is taken where less of it fits. Costs
are rough, and small models lose by sharding: a 0.5B model with adapters on four GPUs over PCIe ran at 12,083
tokens/s under DDP and at 3,403 and 2,945 with gradients or everything sharded (MakazhanAlpamys/Soup)."""
FEWER_GPUS_MUST_SAVE = 0.1
"""The same for one GPU in place of all of them, with `gpus="auto"`."""


def choose(case: Case, table: list[Candidate]) -> tuple[tuple[Candidate, ...], str]:
    """Choose the candidate that runs.

    The cheapest that fits, where each further level of sharding has to save `SHARDING_MUST_SAVE`; what the
    user named is kept, and if it does not fit it is still returned, as not fitting.

    Args:
        case: what is planned.
        table: all candidates.

    Returns:
        All candidates with the chosen one first, then by cost, then what does not fit; each other one with
        its why-not. And the reason for the strategy, in one sentence.
    """
    allowed = [c for c in table if not _excluded(case, c)]
    able = [c for c in allowed if c.fits]
    best = (
        _cheapest(case, able)
        if able
        else min(allowed, key=lambda c: (case.room.shortage(c), c.required_bytes))
    )
    rows = [
        c.model_copy(
            update={
                "relative_cost": c.cost.total / best.cost.total,
                "chosen": c is best,
                "why_not": c.why_not if c is best else _why_not(case, c, best),
            }
        )
        for c in table
    ]
    rows.sort(key=lambda c: (not c.chosen, not c.fits, c.relative_cost if c.fits else c.required_bytes))
    return tuple(rows), _reason(case, best, allowed)


def _cheapest(case: Case, able: list[Candidate]) -> Candidate:
    """Return the cheapest of those that fit, where more sharding and fewer GPUs must earn their place.

    Within a level, those come first whose weights can be read into the machine's memory.
    """
    size = max(c.world_size for c in able)
    full = [c for c in able if c.world_size == size]
    best: Candidate | None = None
    for level in sorted({LEVELS[c.strategy] for c in full}):
        alike = [c for c in full if LEVELS[c.strategy] == level]
        cheap = min([c for c in alike if c.load_bytes <= case.room.host] or alike, key=_order)
        if best is None or cheap.cost.total < (1 - SHARDING_MUST_SAVE) * best.cost.total:
            best = cheap
    assert best is not None
    fewer = min((c for c in able if c.world_size < size), key=_order, default=None)
    if fewer is not None and fewer.cost.total < (1 - FEWER_GPUS_MUST_SAVE) * best.cost.total:
        return fewer
    return best


def _order(candidate: Candidate) -> tuple[float, int, int]:
    """Order within a level: cost, then the order of the table of levels, then the larger micro batch."""
    names = list(LEVELS)
    micro = candidate.per_device_train_batch_size
    return round(candidate.cost.total, 9), names.index(candidate.strategy), -micro


def _excluded(case: Case, candidate: Candidate) -> str:
    """Say which of the user's settings excludes a candidate, or nothing."""
    spec, asked = case.spec, case.spec.training.gradient_checkpointing
    if case.named is not None and candidate.strategy != case.named:
        return f"you asked for {'a JSON like ' if spec.deepspeed_config else ''}{case.named}"
    micros = case.batch.micro_batches(candidate.world_size, candidate.per_device_train_batch_size)
    if case.batch.micro is not None and candidate.per_device_train_batch_size not in micros:
        return f"you asked for micro batch {case.batch.micro}"
    if asked != "auto" and candidate.gradient_checkpointing is not asked:
        return f"you asked for gradient_checkpointing={str(asked).lower()}"
    return ""


def _why_not(case: Case, candidate: Candidate, best: Candidate) -> str:
    """Say why a candidate was not chosen."""
    if not candidate.fits:
        return candidate.why_not
    if excluded := _excluded(case, candidate):
        return excluded
    change = candidate.cost.total / best.cost.total - 1
    if change >= -0.005:
        return f"expected {change:.0%} slower" if change >= 0.005 else "no cheaper"
    if LEVELS[candidate.strategy] > LEVELS[best.strategy]:
        return f"more sharding, and expected to save only {-change:.0%} of a step"
    return f"fewer GPUs, and expected to save only {-change:.0%} of a step"


def _reason(case: Case, best: Candidate, allowed: list[Candidate]) -> str:
    """Say in one sentence why this strategy."""
    room = case.room
    need = f"needs {gib(best.required_bytes)} of {gib(room.device)}"
    if case.named is not None:
        words = case.named_reason
        return words if best.fits else f"{words}, although it does not fit: it {best.why_not}"
    if not best.fits:
        return f"nothing fits; this comes closest: it {best.why_not}"
    if best.world_size == 1:
        if case.world.size > 1:
            return f"one GPU is expected to be faster here than {case.world.size}; {need}"
        return (
            f"one rank shards nothing; {need}"
            if best.strategy == "single"
            else f"single does not fit; {need}"
        )
    less = [c for c in allowed if LEVELS[c.strategy] < LEVELS[best.strategy] and c.world_size > 1]
    able = [c for c in less if c.fits]
    if able:
        other = min(able, key=_order)
        saved = 1 - best.cost.total / other.cost.total
        return f"expected to save {saved:.0%} of a step against {other.strategy}; {need}"
    if less:
        least = min(less, key=lambda c: c.required_bytes)
        return f"the least sharding that fits: {least.strategy} {least.why_not}; this {need}"
    return f"the least sharding that fits; {need}"


def why_checkpointing(case: Case, table: tuple[Candidate, ...]) -> str:
    """Say why gradient checkpointing is on or off."""
    best = table[0]
    if case.spec.training.gradient_checkpointing != "auto":
        return "as asked"
    if not best.gradient_checkpointing:
        return "the activations fit without it" if best.fits else "it would not help"
    plain = _same(table, lambda c: not c.gradient_checkpointing and c.strategy == best.strategy)
    alike = [c for c in plain if c.per_device_train_batch_size == best.per_device_train_batch_size]
    if alike and not alike[0].fits:
        return f"without it {alike[0].label} {alike[0].why_not}"
    return "with it everything else is cheaper"


def why_micro_batch(case: Case, table: tuple[Candidate, ...]) -> str:
    """Say why this micro batch, in words that follow its number."""
    best = table[0]
    micro = best.per_device_train_batch_size
    if case.batch.micro is not None:
        if micro == case.batch.micro:
            return "as asked"
        return f"the largest divisor of a rank's share below the {case.batch.micro} asked for"
    same = _same(table, lambda c: c.strategy == best.strategy and c.world_size == best.world_size)
    larger = [c for c in same if c.per_device_train_batch_size > micro]
    if not larger:
        return "the largest considered that divides a rank's share"
    if not best.fits:
        return "the smallest need of memory"
    return (
        "larger ones do not fit"
        if not any(c.fits for c in larger)
        else "larger ones need recomputation or cost more"
    )


def _same(table: tuple[Candidate, ...], wanted: Callable[[Candidate], bool]) -> list[Candidate]:
    return [c for c in table if wanted(c)]
