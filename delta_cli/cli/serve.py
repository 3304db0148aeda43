"""``delta serve``."""

from __future__ import annotations

import signal
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import BackendOption, CheckpointOption, ThreadsOption
from delta_cli.cli.say import say, say_aside

if TYPE_CHECKING:
    from delta_cli.serving.request_queue import RequestQueue

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@app.command(short_help="Serve a model or a run over HTTP.")
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="Model folder, hub name, tiny-base, or a run.")],
    checkpoint: CheckpointOption = None,
    host: Annotated[str, typer.Option(metavar="NAME", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", help="Port to listen on; 0: any free one.", min=0, max=65535)
    ] = 8000,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", help="Longest response a request may ask for, in tokens.", min=1)
    ] = 4096,
    max_waiting: Annotated[
        int, typer.Option(metavar="N", help="Responses that may wait at a time; further requests get 503.", min=1)
    ] = 1024,
    threads: ThreadsOption = None,
    backend: BackendOption = "auto",
) -> None:
    """Serve a model or a run over HTTP: token ids in and out as vLLM does, and OpenAI's chat and completions.

    Requests that wait at the same time are sampled as one batch. Ctrl-C ends the server. There is no password: whoever
    reaches the address can use the model.
    """
    from backends import registry
    from delta_cli.assets import context_of
    from delta_cli.evaluation.conversation import load_tokenizer_and_template
    from delta_cli.runs.checkpoint_reference import find_checkpoint
    from delta_cli.serving.endpoint_model import LONGEST_CONTEXT, EndpointModel
    from delta_cli.serving.endpoints import Endpoints
    from delta_cli.serving.http_server import HttpServer
    from delta_cli.serving.request_queue import RequestQueue

    reference = find_checkpoint(model, checkpoint, say_aside).with_threads(threads)
    tokenizer, template = load_tokenizer_and_template(reference)
    with closing(registry.create(backend, reference.settings)) as engine:
        reference.load_into(engine)
        context = context_of(reference.settings.model.path) or LONGEST_CONTEXT
        served = EndpointModel(model, tokenizer, engine.vocabulary, context, max_tokens, template)
        requests = RequestQueue(max_waiting)
        server = HttpServer(Endpoints(served, requests).answer, lambda line: say_aside(f"error: {line}"))
        with server.running(host, port) as bound:
            _close_on_signals(requests)
            say(f"serving {model} on http://{f'[{host}]' if ':' in host else host}:{bound}  (Ctrl-C ends it)")
            if host not in LOOPBACK:
                say_aside("note: anyone who can reach this address can use the model; there is no password")
            requests.run(engine)
    say("stopped")


def _close_on_signals(requests: RequestQueue) -> None:
    """Close the queue at the first Ctrl-C; a second one ends the process at once."""

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        requests.close()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
