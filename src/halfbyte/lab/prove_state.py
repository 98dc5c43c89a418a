"""The document of a run that may be interrupted: written beside its final name after every step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """`document` grows step by step; `save` keeps it in FILE.partial, `finish` makes that FILE.

    run: what must be the same for a resumed run to go on with earlier steps; kept as document["run"].
    Without a file nothing is written. Each write goes to a file of its own that then takes the name, so that neither
    FILE nor FILE.partial is ever half-written.
    """

    def __init__(self, file: Path | None, run: dict[str, Any], resume: bool) -> None:
        """Raises ValueError where an unfinished run is in the way, or is another than the one to resume."""
        self.file = file
        self.document: dict[str, Any] = {"run": run}
        if file is None:
            if resume:
                raise ValueError("--resume needs --out: the file of the run to go on with")
            return
        self.partial = file.with_name(file.name + ".partial")
        if not self.partial.exists():
            if resume and file.exists():
                raise ValueError(f"{file} is of a finished run: there is nothing to resume")
            return
        if not resume:
            raise ValueError(f"{self.partial} holds an unfinished run: go on with --resume, or remove it")
        earlier = self._read()
        changed = [key for key, value in run.items() if earlier["run"].get(key) != value]
        if changed:
            raise ValueError(
                f"{self.partial} is of another run: {', '.join(changed)} differ; remove it to start again, or give the "
                "options that it was started with"
            )
        self.document = earlier

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self.partial.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.partial} cannot be read: {error}; remove it to start again") from error
        if not isinstance(document, dict) or not isinstance(document.get("run"), dict):
            raise ValueError(f"{self.partial} is not the state of a run; remove it to start again")
        return document

    def save(self) -> None:
        """Keep what there is."""
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.partial.with_name(f"{self.partial.name}.{os.getpid()}")
        beside.write_text(json.dumps(self.document), encoding="utf-8")
        os.replace(beside, self.partial)

    def finish(self) -> dict[str, Any]:
        """Give the file its name; returns the document."""
        self.save()
        if self.file is not None:
            os.replace(self.partial, self.file)
        return self.document
