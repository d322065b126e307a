"""doctor: installed packages, plug-ins, and the abilities of a path."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from unickpt.extend import terminal_output as terminal
from unickpt.plugins.doctor.examining import DoctorReport, examine

app = terminal.command_app()


@app.command()
def command(
    path: Annotated[
        str | None,
        typer.Argument(help="Also try this directory, or URL: file, s3, gs or memory."),
    ] = None,
    as_json: terminal.AsJson = False,
) -> None:
    """Check the installation and what a path supports; attach the output to bug reports.

    \b
    unickpt doctor                    versions, and the plug-ins of other packages
    unickpt doctor s3://bucket/runs   also what the path supports; writes a small file there

    --json prints all, with the plug-ins of unickpt itself. Fields are only ever added. The
    exit code is 2 if a plug-in cannot be used, or no checkpoint be saved at the path.
    """
    report = examine(path)
    with terminal.verdict(0 if report.ok else terminal.FAILED):
        if as_json:
            terminal.print_json({**asdict(report), "ok": report.ok})
        else:
            _print(report)


def _print(report: DoctorReport) -> None:
    print(f"unickpt {report.version}, Python {report.python}")
    for package in report.packages:
        how = f"not installed: pip install 'unickpt[{package.extra}]'"
        if not package.extra:
            how = f"not installed, and needed: pip install {package.name}"
        print(f"  {package.name:<14}{package.version or how}")
    print("\nplug-ins")
    bundled_plugins = [plugin for plugin in report.plugins if plugin.package == "unickpt"]
    print(f"  {len(bundled_plugins)} of unickpt; formats: {_names(report, 'formats')}")
    print(f"  schemes: {_names(report, 'schemes')}; formats to write: {_names(report, 'writers')}")
    for plugin in report.plugins:
        if plugin.package != "unickpt" or plugin.error:
            name = f"{plugin.group} {plugin.name}, {plugin.package} ({plugin.target})"
            print(terminal.clean(f"  {name}: {plugin.error or 'works'}"))
    if report.url:
        print(f"\n{terminal.clean(report.url)}")
    for ability in report.abilities:
        works = "yes" if ability.works else "NO" if ability.is_needed else "no"
        print(terminal.clean(f"  {ability.name:<20}{works:<5}{ability.detail}").rstrip())


def _names(report: DoctorReport, group: str) -> str:
    usable = (p.name for p in report.plugins if p.group == group and not p.error)
    return ", ".join(dict.fromkeys(usable))
