"""Block types, and documents: YAML files that are kept as blocks.

`NAME.yaml` is a job (`SoupTrainingJob`); `NAME.TYPE.yaml` is a block of another type: `placement`,
`checkpoint-store`, `experiment-tracker`. Secrets do not belong into files: they are given in Prefect's page.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound
from pydantic import ValidationError

from soup_flows import blocks
from soup_flows.deploy.values import DeployRequest, Step
from soup_flows.errors import Problem, Refused, nearest, refuse
from soup_flows.spec import parse_spec
from soup_flows.spec_file import MAX_SPEC_BYTES
from soup_flows.user_file import BadFile
from soup_flows.user_yaml import read_yaml

JOB = "training-job"


def block_types() -> list[type[Block]]:
    """Return the block types of this package, by name."""
    found = [v for v in vars(blocks).values() if isinstance(v, type) and issubclass(v, Block)]
    return sorted((t for t in found if t.__module__ == blocks.__name__), key=lambda t: t.__name__)


def ensure_block_types(client: SyncPrefectClient, dry_run: bool) -> list[Step]:
    """Register the block types; the server keeps older versions of a schema."""
    known = {kind.slug for kind in client.read_block_types()}
    steps = []
    for kind in block_types():
        slug = kind.get_block_type_slug()
        if not dry_run:
            kind.register_type_and_schema()
        steps.append(Step(kind="block type", name=slug, action="update" if slug in known else "create"))
    return steps


def ensure_documents(client: SyncPrefectClient, request: DeployRequest, dry_run: bool) -> list[Step]:
    """Keep this package's documents as blocks where there are none of their names, and those of the request.

    What somebody changed in Prefect's page stays, but for documents in the request's own folder: there the file
    is what counts.

    Raises:
        Refused: for documents that are wrong, all of them at once; nothing was saved.
    """
    with resources.as_file(resources.files("soup_flows.deploy") / "documents") as folder:
        ours = read_documents(folder)
    theirs = read_documents(Path(request.blocks).expanduser()) if request.blocks is not None else {}
    steps = []
    for (slug, name), block in {**ours, **theirs}.items():
        try:
            client.read_block_document_by_name(name, slug, include_secrets=False)
            action: Any = "update" if (slug, name) in theirs else "keep"
        except ObjectNotFound:
            action = "create"
        if action != "keep" and not dry_run:
            block.save(name, overwrite=True, _sync=True)  # type: ignore[call-arg]
        steps.append(Step(kind="block", name=f"{slug}/{name}", action=action))
    return steps


def read_documents(folder: Path) -> dict[tuple[str, str], Block]:
    """Return the blocks of the documents in a folder, by type slug and name.

    Raises:
        Refused: if there are none, or for what is wrong with them, all at once.
    """
    files = sorted(folder.glob("*.yaml"))
    if not files:
        fix = "name a folder with files such as my-job.yaml or box.placement.yaml"
        raise refuse("DEPLOY009", "--blocks", f"there is no *.yaml in {folder}", fix)
    found, problems = {}, []
    for file in files:
        try:
            block = _read(file)
        except Refused as refused:
            named = (p.model_copy(update={"field": f"{file.name}: {p.field}"}) for p in refused.problems)
            problems += list(named)
        else:
            found[block.get_block_type_slug(), file.stem.partition(".")[0]] = block
    if problems:
        raise Refused(problems)
    return found


def _read(file: Path) -> Block:
    """Return the block of a document.

    Raises:
        Refused: with everything that is wrong with it.
    """
    types = {kind.get_block_type_slug().removeprefix("soup-"): kind for kind in block_types()}
    _, _, slug = file.stem.partition(".")
    slug = slug or JOB
    try:
        values = read_yaml(file, MAX_SPEC_BYTES)
    except BadFile as bad:
        raise refuse("DEPLOY009", "file", str(bad), bad.fix) from None
    if slug == JOB:
        return blocks.SoupTrainingJob(spec=parse_spec(values))
    if slug not in types:
        fix = nearest(slug, types) or f"types: {', '.join(sorted(types))}"
        raise refuse("DEPLOY009", "file", f"there is no block type {slug!r}", fix)
    problems = _unfit(types[slug], values)
    if problems:
        raise Refused(problems)
    return types[slug](**values)


def _unfit(kind: type[Block], values: dict[str, Any]) -> list[Problem]:
    """Return what a block would keep though it is no field, what is secret, and what its fields refuse."""
    fields, found = kind.model_fields, []

    def add(field: str, message: str, fix: str) -> None:
        found.append(Problem(id="DEPLOY009", severity="error", field=field, message=message, fix=fix))

    for name in values:
        if name not in fields:
            add(name, "is no field", nearest(name, fields) or f"fields: {', '.join(fields)}")
        elif "Secret" in str(fields[name].annotation):
            add(
                name, "is secret and stands in a file", "leave it out, and give it in Prefect's page (Blocks)"
            )
    try:
        kind(**{name: value for name, value in values.items() if name in fields})
    except ValidationError as error:
        for item in error.errors():
            where = ".".join(map(str, item["loc"]))
            add(where, item["msg"], f"{fields[str(item['loc'][0])].description}")
    return found
