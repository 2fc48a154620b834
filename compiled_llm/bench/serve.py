"""A server under load: latencies, throughput and goodput over HTTP, with the flags of ``vllm bench serve``.

    compiled-llm bench serve --num-prompts 200 --request-rate 4 --input-len 128 --output-len 64 --ignore-eos
    compiled-llm bench serve --backend openai-chat --base-url http://127.0.0.1:8000 --max-concurrency 16 --ignore-eos
    compiled-llm bench serve --rates 1,2,4,8 --goodput ttft:500 tpot:100 --picture load.svg

Any server with OpenAI's interface can be measured: this one, vLLM's, llama.cpp's. Requests arrive at ``--request-rate``
a second, as a Poisson process or in bursts (``--burstiness``), or as soon as one of ``--max-concurrency`` places is
free. A request's times count from the moment when it was due, or when its place was free, with the connection that it
may need. TTFT and ITL are of events that brought text; TPOT and throughput of the tokens that the server's usage
counts, as an event may bring several. Without ``--ignore-eos`` a model may end early.

Prompts are token ids, of which ``openai-chat`` sends the text. Random ones differ in each run, so that no run finds
those of another in the server's prefix cache. Where the server needs a key, OPENAI_API_KEY has it.

``--find-goodput`` searches the highest rate at which ``--goodput-share`` of the requests meet the targets. The table
ends with what an event cost this process, which must be far from a core's time. ``--save-result`` writes vLLM's keys.
The last line is JSON. Exit status: 0, 1 if a request failed or no rate was found, 2 for bad arguments.
"""

import argparse
import gc
import importlib.util
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.config import EngineConfig
from compiled_llm.bench import serving
from compiled_llm.bench.load import (
    LoadRun,
    add_load_flags,
    arrival_times,
    check_load,
    conclude,
    metrics_of,
    rate_of,
    rows_of,
    search,
)
from compiled_llm.bench.workloads import Requests, WorkloadRequest
from compiled_llm.checkpoint.model_files import DEMO_MODEL, load_tokenizer, model_directory
from compiled_llm.terminal.server_client import ServerClient
from compiled_llm.text.tokenizer import Tokenizer

_PACKAGES = ("httptools", "msgspec", "uvloop")
_ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_DEMO_NAME = "compiled-llm-demo"  # which the server calls the bundled model


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="A server under load: latencies, throughput and goodput over HTTP.")
    add = made.add_argument
    add("--base-url", metavar="URL", help="as http://127.0.0.1:8000; instead of --host and --port")
    add("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="(default: 8000)")
    add("--backend", choices=_ENDPOINTS, default="openai", help="completions, or chats (default: openai)")
    add("--endpoint", metavar="PATH", help="default: /v1/completions, of openai-chat /v1/chat/completions")
    add("--model", metavar="NAME", help="what the server calls it (default: the first of /v1/models)")
    add("--tokenizer", metavar="DIR", help="directory, GGUF file or hub id (default: as --model)")
    add("--header", nargs="+", default=[], metavar="NAME=VALUE", help="headers of each request")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="fields of each request")
    add("--ignore-eos", action="store_true", help="each answer has exactly output_len tokens")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    serving.add_request_flags(made)
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    add_load_flags(made, "server", percentiles="50,90,99")
    add("--rates", metavar="R,R...", help="a run at each of these rates, instead of --request-rate")
    add("--picture", type=tables.picture_file, metavar="FILE.png", help="latencies over time, or over --rates")
    made.seldom |= {"--endpoint", "--header", "--extra-body", "--temperature"}
    return made


def _check(args: argparse.Namespace) -> None:
    """Parses in place. ``ValueError`` for bad arguments; nothing is sent yet."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"bench serve needs the packages {', '.join(missing)}: pip install 'compiled-llm[server]'")
    args.rates = None if args.rates is None else [_rate(text) for text in args.rates.split(",")]
    check_load(args, {"rates": "which is searched", "picture": "which is of one run, or of --rates"})
    if args.rates and args.request_rate is not None:
        raise ValueError(f"--request-rate must be left out with --rates, given {args.request_rate}")
    if not isinstance(args.extra_body, dict):
        raise ValueError(f"--extra-body must be a JSON object, given {json.dumps(args.extra_body):.100}")
    if bad := [text for text in args.header if not text.partition("=")[2] or not text.isprintable()]:
        raise ValueError(f"--header must be NAME=VALUE, given {bad[0]!r:.100}")


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ValueError(f"--rates must be numbers above 0, as 1,2,4; given {text!r:.100}")
    return rate


class _Model(NamedTuple):
    """The model that a server has.

    Attributes:
        name: the server's.
        tokenizer_name: of its files here.
    """

    name: str
    tokenizer_name: str
    tokenizer: Tokenizer


def _model(args: argparse.Namespace, client: ServerClient) -> _Model:
    """``ValueError``, ``OSError``: the server does not answer, or nothing here knows the model's tokens."""
    models = client.models()
    if args.model is None and not models:
        raise ValueError(f"{client.url} serves no model")
    name = args.model or models[0]["id"]
    given = args.tokenizer or (str(DEMO_MODEL) if name == _DEMO_NAME else name)
    try:
        tokenizer = load_tokenizer(
            EngineConfig(model=given), model_directory(given, name="tokenizer", with_weights=False)
        )
    except ValueError as error:
        raise ValueError(
            f"--tokenizer must be that of the model {name!r}, for prompts of a given length: {error}"
        ) from error
    if tokenizer is None:
        raise ValueError(f"--tokenizer must have a tokenizer.json, given {given!r}")
    return _Model(name, given, tokenizer)


class _Bench:
    """Runs at different rates, each of prompts of its own if they are random."""

    def __init__(self, client: ServerClient, model: _Model, args: argparse.Namespace) -> None:
        from compiled_llm.bench.http_load import Target

        headers = {**client.headers, **dict(text.split("=", 1) for text in args.header)}
        self._target = Target.of(
            client.url + (args.endpoint or _ENDPOINTS[args.backend]),
            [f"{name}: {value}" for name, value in headers.items()],
        )
        self._model, self._args = model, args
        self._seeds = itertools.count(args.seed)
        self._vocab_size = len(model.tokenizer.vocabulary()[1])
        self.requests = self._draw()

    def _draw(self) -> Requests:
        args = argparse.Namespace(**{**vars(self._args), "seed": next(self._seeds)})
        return serving.requests_for(args, self._vocab_size, self._model.tokenizer)

    def warm_up(self) -> None:
        """Requests whose prompts no other begins with. ``OSError``: one fails."""
        from compiled_llm.bench.http_load import drive

        first = self.requests[0]
        one = self._body(first._replace(prompt_token_ids=first.prompt_token_ids[::-1]))
        for served in drive(self._target, [one] * self._args.num_warmups, [0.0] * self._args.num_warmups)[0]:
            if served.error:
                raise OSError(f"a first request failed: {served.error}")

    def run(self, rate: float) -> LoadRun:
        from compiled_llm.bench.http_load import drive

        args, requests = self._args, self.requests or self._draw()
        self.requests = []
        bodies = [self._body(request) for request in requests]
        arrivals = arrival_times(len(requests), rate, args.burstiness, args.seed)
        gc.collect()
        gc.freeze()  # what was loaded is not looked through while requests run
        with tqdm(total=len(requests), desc=f"rate {rate:g}", disable=None) as bar:
            served, duration, cpu = drive(self._target, bodies, arrivals, args.max_concurrency, progress=bar.update)
        metrics = metrics_of(served, duration, args.goodput, args.percentile_metrics, args.metric_percentiles)
        num_events = sum(len(one.token_times) for one in served)
        client = {"events": num_events, "cpu_us_an_event": cpu / max(1, num_events) * 1e6, "cpu_share": cpu / duration}
        return LoadRun(rate, metrics | {"client": client}, served)

    def _body(self, request: WorkloadRequest) -> bytes:
        args, prompt = self._args, request.prompt_token_ids
        body: dict[str, Any] = {"model": self._model.name, "temperature": args.temperature, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if args.backend == "openai":
            body |= {"prompt": prompt, "max_tokens": request.output_len}
        else:
            message = {"role": "user", "content": self._model.tokenizer.decode(prompt)}
            body |= {"messages": [message], "max_completion_tokens": request.output_len}
        if args.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body | args.extra_body).encode()


def _sweep_row(run: LoadRun, percentiles: Sequence[float]) -> dict[str, Any]:
    """A run of ``--rates`` as a row of a table."""
    metrics = run.metrics
    last = f"{percentiles[-1]:g}"
    row = {
        "rate": run.rate,
        "requests/s": metrics["request_throughput"],
        "tokens/s": metrics["output_throughput"],
        "failed": metrics["failed"],
    }
    for name in ("ttft", "tpot"):
        if f"median_{name}_ms" in metrics:
            row |= {f"{name} ms": metrics[f"median_{name}_ms"], f"{name} p{last}": metrics[f"p{last}_{name}_ms"]}
    return row if metrics["goodput_share"] is None else row | {"within targets": metrics["goodput_share"]}


def _print(result: Mapping[str, Any], args: argparse.Namespace, runs: Sequence[LoadRun]) -> None:
    if len(runs) > 1:
        print(tables.text_table([_sweep_row(run, args.metric_percentiles) for run in runs]))
    client = result["client"]
    cost = f"{client['cpu_us_an_event']:.0f} us an event, {client['cpu_share']:.0%} of a core"
    title = f"{result['base_url']}, {result['model_id']}: {result['num_prompts']} requests, {runs[-1].rate:g} a second"
    tables.print_table(title, rows_of(dict(result), args) | {"the client itself": cost})


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    args = parser(program).parse_checked(_check, arguments, max_concurrency=1, num_warmups=0, goodput_steps=0)
    with errors_end(program):
        client = ServerClient(args.base_url or f"http://{args.host}:{args.port}", os.environ.get("OPENAI_API_KEY"))
    with errors_end(program, (OSError,), 1), errors_end(program, (ValueError,)):
        model = _model(args, client)
    with errors_end(program):
        bench = _Bench(client, model, args)
    with errors_end(program, (OSError,), 1):
        bench.warm_up()
    if args.find_goodput:
        runs = [search(bench.run, args)]
    else:
        runs = [
            bench.run(rate) for rate in args.rates or [math.inf if args.request_rate is None else args.request_rate]
        ]
    run = runs[-1]
    if args.rates:
        swept = [{"request_rate": rate_of(each.rate), **each.metrics} for each in runs]
        run = run._replace(metrics=run.metrics | {"sweep": swept})
    if args.picture is not None:
        from compiled_llm.bench.load_picture import draw

        draw(args.picture, runs, f"{model.name} at {client.url}: {len(run.served)} requests a run")
    facts = {"backend": args.backend, "base_url": client.url, "model_id": model.name}
    facts["tokenizer_id"] = model.tokenizer_name
    status = conclude("serve", args, run, facts, table=lambda result: _print(result, args, runs))
    return 1 if any(each.metrics["failed"] for each in runs) else status
