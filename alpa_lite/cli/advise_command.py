"""The command `advise`: which form of parallelism for a known model on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import alpa_lite as al
from alpa_lite.api.advice import SECONDS, Advice, SizedStep, advise_sized, other_clusters
from alpa_lite.cli.command import Command, OutputError, answer, check_writable, positive, seconds, suggests, writing
from alpa_lite.cli.exit_codes import Exit
from alpa_lite.cli.models.named_models import MODELS, NamedModel, model_named
from cost_models.cluster import Cluster, known_clusters

_ENDINGS = {"torchtitan": "toml", "maxtext": "yml", "megatron": "txt"}


def run_advise(given: argparse.Namespace) -> int:
    """Print the best plan of each family of trainers for a model, and write plans and settings of trainers."""
    check_writable(given.picture)
    if given.output is not None and given.output.exists() and not given.output.is_dir():
        raise OutputError(f"{given.output} is a file: --output takes a folder, which is made if there is none.")
    model, cluster = model_named(given.model), al.cluster(given.cluster)
    length = given.seq or model.sizes.seq_len
    first, *others = _sized_steps(model, cluster, given.batch, length)
    found = advise_sized(first, others, seconds=given.seconds, dollars_per_device_hour=given.price)
    notes = [] if given.output is None else _written(found, given.output)
    if given.picture is not None:
        _draw(found, given.picture)
    devices = f"{cluster.num_devices} devices of {cluster.name}"
    title = f"{model.name} on {devices}, a batch of {given.batch} sequences of {length} tokens"
    answer(
        given, "\n\n".join([title, str(found), *notes]), lambda: {**_given(given, length, cluster), **found.to_json()}
    )
    if found.fastest is not None:
        return Exit.DONE
    return Exit.INFEASIBLE if any(each.does_not_fit for each in found.families) else Exit.ERROR


def _given(given: argparse.Namespace, length: int, cluster: Cluster) -> dict[str, object]:
    return {
        "model": given.model,
        "cluster": cluster.name,
        "num_devices": cluster.num_devices,
        "batch_size": given.batch,
        "seq_len": length,
    }


def _sized_steps(model: NamedModel, cluster: Cluster, batch: int, length: int) -> Iterator[SizedStep]:
    """Yield what is asked for, and the same with half and twice the batch, the length and the hosts."""
    step, args = model.training(batch, length)
    yield SizedStep(name="", step=step, args=args, cluster=cluster)
    for name, each in other_clusters(cluster).items():
        yield SizedStep(name=name, step=step, args=args, cluster=each)
    sizes = {f"batch {size}": (size, length) for size in (batch // 2, 2 * batch) if size}
    sizes |= {f"{size} tokens": (batch, size) for size in (length // 2, 2 * length) if size}
    for name, (samples, tokens) in sizes.items():
        step, args = model.training(samples, tokens)
        yield SizedStep(name=name, step=step, args=args, cluster=cluster)


def _written(found: Advice, folder: Path) -> list[str]:
    """Write all plans, and the settings of the trainers that have them; return a sentence on the files."""
    files = {f"{_file_name(each.family.name)}.json": each.plan for each in found.families}
    settings = {f"{target}.{_ENDINGS[target]}": text for target, text in found.exports().items()}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, plan in files.items():
            if plan is not None:
                plan.save(folder / name)
        for name, text in settings.items():
            (folder / name).write_text(text, encoding="utf-8")
    names = [name for name, plan in files.items() if plan is not None] + [*settings]
    return [f"Written to {folder}: {', '.join(names)}."] if names else []


def _file_name(name: str) -> str:
    return name.lower().removesuffix("-like")


def _draw(found: Advice, path: Path) -> None:
    """Draw samples per second of all plans, by the number of devices."""
    named = [(each.family.name, each.plan) for each in found.families]
    best = found.fastest
    if best is not None:
        # Only other clusters: a bar of another batch or length would stand among those of the same devices.
        sizes = [each.plan for each in found.other_sizes if each.plan is not None]
        named += [(best.family.name, plan) for plan in sizes if plan.cluster.num_devices != found.cluster.num_devices]
    plans = [(name, plan) for name, plan in named if plan is not None]
    if plans:
        figure = al.figures.plans_figure([plan for _, plan in plans], names=[name for name, _ in plans])
        with writing(path):
            figure.savefig(path)


def _arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument(
        "model", metavar="MODEL", help=f"{', '.join(MODELS)}, with sizes as llama-8b:num_layers=16"
    )
    suggests(model, tuple(MODELS))
    cluster = parser.add_argument(
        "--cluster", required=True, metavar="NAME[:HOSTS]", help="a known cluster or a .json file, with its hosts"
    )
    suggests(cluster, known_clusters())
    parser.add_argument("--batch", required=True, type=positive, metavar="N", help="sequences of a step")
    parser.add_argument("--seq", type=positive, metavar="N", help="tokens of a sequence (default: as published)")
    parser.add_argument(
        "--seconds", type=seconds, default=SECONDS, metavar="S", help="about how long to take (default: 14)"
    )
    parser.add_argument("--price", type=seconds, metavar="DOLLARS", help="price of a device per hour")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write all plans, and the settings of trainers")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the plans, as .svg, .png or .pdf")


ADVISE = Command(
    name="advise",
    about="which form of parallelism for a known model: the best plan of each family of trainers",
    example="llama-70b --cluster dgx-h100:64 --batch 1024 --seq 8192",
    run=run_advise,
    add_arguments=_arguments,
)
