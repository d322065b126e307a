"""seal: digests beside the files of a safetensors or GGUF folder."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from unickpt.extend import counted, size_text
from unickpt.extend import terminal_output as terminal
from unickpt.plugins.seal.sealing import check_seal, seal

app = terminal.command_app()


@app.command()
def command(
    folder: Annotated[str, typer.Argument(help="A directory, or a URL: file, s3, gs or memory.")],
    check: Annotated[
        bool, typer.Option("--check", help="Compare all files with the seal; write nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the seal of a folder that was changed.")
    ] = False,
    as_json: terminal.AsJson = False,
) -> None:
    """Write digests beside a safetensors or GGUF folder, which every load of unickpt checks.

    \b
    unickpt seal models/llama            writes models/llama/unickpt.seal.json
    unickpt seal models/llama --check    compares every byte

    --json prints {url, format, files, nbytes, digest, problems, ok}. The exit code is 1 if a file
    differs from what was sealed, is missing, or was added.
    """
    report = check_seal(folder) if check else seal(folder, overwrite=overwrite)
    with terminal.verdict(0 if report.ok else terminal.DIFFERENT):
        if as_json:
            terminal.print_json({**asdict(report), "ok": report.ok})
            return
        what = f"{counted(report.files, 'file')} of {report.format}, {size_text(report.nbytes)}"
        verb = "sealed" if not check else "as sealed" if report.ok else "NOT as sealed"
        print(f"{terminal.clean(report.url)}: {verb}: {what}, digest {report.digest}")
        for problem in report.problems:
            print(f"  {terminal.clean(problem)}")
