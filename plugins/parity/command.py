"""repair: rewrites damaged and missing files of a checkpoint from parity."""

from __future__ import annotations

from dataclasses import asdict

from unickpt.extend import counted, terminal_output
from unickpt.plugins.parity.repairing import RepairReport, repair

app = terminal_output.command_app()


@app.command()
def command(path: terminal_output.Where, as_json: terminal_output.AsJson = False) -> None:
    """Rewrite damaged and missing files of a checkpoint from its parity files.

    Reads all files that have parity. Exits with 2 if more are lost than parity restores, and
    names them and their arrays; it restores the others all the same.

    \b
    unickpt repair runs/step_100
    unickpt repair s3://bucket/runs/step_100 --json

    --json prints {url, files, repaired, unprotected, seconds}: the number of files that were
    checked, and lists of paths. Fields are only ever added.
    """
    report = repair(path)
    if as_json:
        terminal_output.print_json(asdict(report))
    else:
        _print(report)


def _print(report: RepairReport) -> None:
    for name in report.repaired:
        print(terminal_output.clean(f"repaired {name}"))
    for name in report.unprotected:
        print(terminal_output.clean(f"damaged, and not restored: the parity file {name}"))
    checked = counted(report.files, "file")
    print(f"{len(report.repaired)} of {checked} repaired in {report.seconds:.2f} s")
