"""What counts: silenced findings become notes with their reason, and strict runs refuse warnings."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from soup_flows.errors import Problem, nearest
from soup_flows.spec import ValidationSettings
from soup_flows.validation.table import by_severity


def settle(
    problems: Iterable[Problem], settings: ValidationSettings, known: Collection[str]
) -> list[Problem]:
    """Apply `silence` and `strict`.

    Args:
        problems: what was found.
        settings: the spec's group `validation`.
        known: ids that may be silenced beside those found.

    Returns:
        The problems, errors first. A silenced id that does not exist is an error; one that found nothing is
        not mentioned.
    """
    found = list(problems)
    ids = {*known, *(problem.id for problem in found)}
    result = [_settled(problem, settings) for problem in found]
    for rule in settings.silence:
        if rule not in ids:
            result.append(
                Problem(
                    id="VA001",
                    severity="error",
                    field=f"validation.silence.{rule}",
                    message=f"there is no rule {rule!r} to silence",
                    fix=nearest(rule, ids) or "remove it",
                )
            )
    return by_severity(result)


def _settled(problem: Problem, settings: ValidationSettings) -> Problem:
    reason = settings.silence.get(problem.id)
    if reason is not None:
        said = f"{problem.message} (a {problem.severity}, silenced: {reason})"
        return problem.model_copy(update={"severity": "note", "message": said})
    if settings.strict and problem.severity == "warning":
        return problem.model_copy(update={"severity": "error"})
    return problem
