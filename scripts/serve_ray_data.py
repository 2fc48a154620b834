"""Rows of Parquet files through Ray Data, with an engine in each of its actors, and checkpoints to go on from.

    python scripts/serve_ray_data.py --input rows.parquet --output answers --checkpoint done --num-engines 2

For data that goes through Ray Data anyway: ``compiled-llm batch --ray`` writes one file, each row when it ends.

The rows have the keys of docs/offline.md as columns, and ``index``, another integer for each. The output is a directory
of Parquet files with the columns ``answer`` and ``error`` besides. A run that was stopped goes on when it is started
again with the same arguments: rows whose file is there are not served again.
"""

import sys
from pathlib import Path
from typing import Any

import own_checkout

from compiled_llm.api.command_line import (
    FlagParser,
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    errors_end,
    sampling_arguments,
)
from compiled_llm.offline.flags import DEFAULT_SAMPLING
from compiled_llm.offline.ray_workers import RayCluster

_DATA_CORES = 2  # for a task that reads or writes, and for the actor that leaves out what is done
_OBJECT_BYTES = 2**30  # blocks of rows on this machine, if the cluster is one of its own


def serve(
    inputs: list[str],
    output: Path,
    checkpoint: Path,
    num_engines: int,
    batch_size: int,
    arguments: dict[str, Any],
    **options: Any,
) -> None:
    """A plan of Ray Data: read, serve, write.

    Args:
        arguments: of ``RayDataEngine``.
        options: of ``map_batches``.
    """
    from ray.data import ActorPoolStrategy, DataContext, read_parquet
    from ray.data.checkpoint import CheckpointConfig

    from compiled_llm.offline.ray_data import RayDataEngine

    # Deleted on success, it would have a second run serve all rows again.
    done = CheckpointConfig("index", str(checkpoint.absolute()), delete_checkpoint_on_success=False)
    DataContext.get_current().checkpoint_config = done
    rows = read_parquet([str(Path(name).absolute()) for name in inputs])
    rows = rows.repartition(target_num_rows_per_block=batch_size)  # a block is a file of the output, and a checkpoint
    answers = rows.map_batches(
        RayDataEngine,
        fn_constructor_kwargs=arguments,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=num_engines),
        batch_size=batch_size,
        **options,
    )
    answers.write_parquet(str(output.absolute()))


def check_cores(cluster: RayCluster, taken: int) -> None:
    """``ValueError`` unless the engines leave cores to Ray Data's own tasks, for which they would wait for ever."""
    cores = int(cluster.ray.cluster_resources().get("CPU", 0))
    if taken > cores - _DATA_CORES:
        raise ValueError(
            f"--num-engines x --num-cpus must be at most {cores - _DATA_CORES}, given {taken}: Ray Data needs "
            f"{_DATA_CORES} of the {cores} cores; --num-cpus 0 has engines run beside it, each with --num-threads"
        )


def main() -> int:
    parser = FlagParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--input", required=True, nargs="+", metavar="FILE.parquet", help="on a disk of all machines")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="on such a disk")
    parser.add_argument("--checkpoint", required=True, type=Path, metavar="DIR", help="on such a disk")
    parser.add_argument("--ray", default="", metavar="ADDRESS", help="as that of compiled-llm batch")
    parser.add_argument("--num-engines", type=int, default=1, metavar="N")
    parser.add_argument(
        "--num-cpus", type=int, default=1, metavar="N", help="cores that Ray counts for an engine (default: 1)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=1024,
        metavar="N",
        help="rows that an engine gets at once, and of a file of the output",
    )
    add_engine_arguments(parser)
    add_sampling_arguments(parser, **DEFAULT_SAMPLING)
    args = parser.parse_checked(num_engines=1, num_cpus=0, batch_size=1)
    with errors_end(parser.prog):
        engine_arguments = vars(engine_config(args))
        cluster = RayCluster(args.ray, _OBJECT_BYTES)
        device = cluster.device_type(args.device)
        check_cores(cluster, args.num_engines * args.num_cpus)
    arguments = {**engine_arguments, "device": device, "sampling": sampling_arguments(args)}
    if device == "cpu":  # those of one machine share its memory
        arguments["gpu_memory_utilization"] /= cluster.most_together(args.num_engines, max(1, args.num_cpus))
    needs = {"num_cpus": args.num_cpus, "num_gpus": int(device == "cuda")}
    serve(args.input, args.output, args.checkpoint, args.num_engines, args.batch_size, arguments, **needs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
