"""The command jobs: the queue of the studio in the terminal."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from ..console import Table, make_console
from .options import TRAIN, print_next_steps, stderr_console

app = typer.Typer()


@app.command(rich_help_panel=TRAIN, epilog="Example: tastemaker jobs runs --submit 'train grpo-toy-flow name=a'")
def jobs(
    runs: Annotated[Path, typer.Argument(help="Directory of runs.")] = Path("runs"),
    submit: Annotated[str, typer.Option(help="Command to add to the queue, without `tastemaker`.")] = "",
    device: Annotated[
        str, typer.Option(help="Device of --submit: cpu, cuda:0, ...; auto: the least busy GPU.")
    ] = "auto",
    stop: Annotated[str, typer.Option(help="Id of a job that should save and stop.")] = "",
    kill: Annotated[str, typer.Option(help="Id of a job that was asked to stop and did not: end it unsaved.")] = "",
    remove: Annotated[str, typer.Option(help="Id of a job to delete from the list; its run stays.")] = "",
    advance: Annotated[
        bool, typer.Option("--advance", help="Start waiting jobs, one per device, until none is left.")
    ] = False,
) -> None:
    """List the queue of runs, and add, stop or remove jobs.

    Waiting jobs start while `tastemaker studio` or this command with --advance runs. Started ones need neither.
    """
    from ..studio.job_queue import ENDED, JobQueue, submit_command

    queue, console = JobQueue(runs), make_console()
    if submit:
        console.print(submit_command(queue, shlex.split(submit), device), highlight=False)
    for id, change in ((stop, queue.stop), (kill, queue.kill), (remove, queue.remove)):
        if id:
            change(id)
    if advance:
        stderr_console().print("advancing the queue; press Ctrl-C to stop advancing, jobs go on")
        while any(job.state not in ENDED for job in queue.jobs()):
            queue.advance()
            time.sleep(0.5)
    print_next_steps(f"tastemaker studio {runs}", f"tastemaker jobs {runs} --advance")
    if submit or stop or kill or remove:
        return
    table = Table("id", "state", "device", "job", "reason")
    for job in queue.jobs():
        table.add_row(job.id, job.state, job.device, job.title, job.reason)
    console.print(table)
