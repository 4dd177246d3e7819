"""All commands under one."""

from __future__ import annotations

from interlock.cli import db, demo, jobs, migrate, namespaces, sort, tasks, token
from interlock.cli.diagram import diagram
from interlock.cli.doctor import doctor
from interlock.cli.enqueue import enqueue
from interlock.cli.explain import explain
from interlock.cli.orchestrator import orchestrator
from interlock.cli.root import rooted, run_app
from interlock.cli.status import history, status
from interlock.cli.submit import submit
from interlock.cli.supervisor import supervisor
from interlock.cli.up import up
from interlock.cli.worker import worker

app = rooted()
app.command()(demo.demo)
app.command()(up)
app.command()(migrate.migrate)
app.command()(diagram)
app.command()(worker)
app.command()(orchestrator)
app.command()(supervisor)
app.command()(enqueue)
app.command()(submit)
app.command()(status)
app.command()(history)
app.command()(explain)
app.command()(doctor)
app.add_typer(tasks.app, name="tasks")
app.add_typer(jobs.app, name="jobs")
app.add_typer(namespaces.app, name="namespaces")
app.add_typer(token.app, name="token")
app.add_typer(db.app, name="db")
app.add_typer(sort.app, name="sort")


def run() -> None:
    """Run the command line and end with its exit code."""
    run_app(app)
