"""Several real processes for tests: each a rank of a torch.distributed job over gloo on the CPU.

A crew's processes live through a test run, since importing torch and transformers takes seconds;
each task starts a job of its own in them, as `dualinfer launch` does: they listen on the loopback.
"""

import faulthandler
import importlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from pathlib import Path

from dualinfer.parallel import launching

ROOT = Path(__file__).parents[1]
MOST = 4
_PATIENCE = 180  # seconds for one task


class RankError(AssertionError):
    """What a rank raised; `kinds` are the names of the errors' classes, by rank, None for none."""

    def __init__(self, text, kinds):
        super().__init__(text)
        self.kinds = kinds


class Crew:
    """Up to MOST processes; `run` calls a function in some of them, as ranks of one job."""

    def __init__(self):
        self._workers = {}  # by the size of their jobs: see `run`

    def run(self, function, *args, world=2, environment=None, alive=None):
        """What `function(*args)` returns in each rank, in order; it must be a test module's own.

        Raises RankError with every rank's error where one raised. `environment` is added to each
        rank's. Ranks not in `alive` do not take part, as if they had never started.
        """
        # Exchanges between GPUs take their names from what a process has done before, which must be
        # alike in all of a job (pytorch#196082); on the CPU jobs of any size take the same ones.
        key = 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else world
        workers = self._workers.setdefault(key, [])
        while len(workers) < world:
            workers.append(_start())
        for _, pipe in workers[:world]:  # no job's timeout shall include a start
            pipe.send(None)
            assert pipe.poll(_PATIENCE) and pipe.recv() == "ready"
        store, port = launching.open_store()
        ranks = [r for r in range(world) if alive is None or r in alive]
        for rank in ranks:
            variables = {
                **launching.loopback_only(),
                **launching.place_of(rank, world, port),
                **(environment or {}),
            }
            task = function.__module__, function.__qualname__, args, variables
            workers[rank][1].send(task)
        results, errors = {}, {}
        deadline = time.monotonic() + _PATIENCE
        for rank in ranks:
            process, pipe = workers[rank]
            try:
                if not pipe.poll(max(0, deadline - time.monotonic())):
                    raise EOFError(f"no answer in {_PATIENCE} seconds")
                done, value = pipe.recv()
            except (EOFError, OSError) as error:
                process.kill()
                process.join()
                done, value = False, ("Gone", f"{error} (exit code {process.exitcode})")
            (results if done else errors)[rank] = value
        del store
        if any(kind == "Gone" for kind, _ in errors.values()):
            _end(workers)
        if errors:
            text = "\n".join(f"rank {r}: {kind}: {e}" for r, (kind, e) in sorted(errors.items()))
            kinds = [errors[r][0] if r in errors else None for r in ranks]
            raise RankError(text, kinds)
        return [results[rank] for rank in ranks]

    def close(self):
        """End the processes."""
        for workers in self._workers.values():
            _end(workers)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def listeners(pid="self"):
    """The addresses, as hex, of the TCP sockets on which a process of this machine listens."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:  # the one by which the folder was read
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    return found


def _end(workers):
    for process, pipe in workers:
        pipe.close()
        process.kill()
        process.join()
    workers.clear()


def _start():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "tests.models"])  # imported once for all
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _work(pipe):
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    importlib.import_module("tests.models")  # before a task's own timeout counts
    torch.set_num_threads(1)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        if task is None:
            pipe.send("ready")
            continue
        module, name, args, variables = task
        os.environ.update(variables)
        faulthandler.dump_traceback_later(_PATIENCE - 10)  # where it hangs
        try:
            found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            answer = True, found(*args)
        except BaseException as error:
            answer = False, (type(error).__name__, f"{error}\n{traceback.format_exc()}")
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()
            for variable in variables:
                os.environ.pop(variable, None)
        pipe.send(answer)
