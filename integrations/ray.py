"""Checkpoints of Ray Train (v2) by reference: unickpt writes to the run's storage, and Ray gets a
reference.

    from unickpt.integrations.ray import report, url_of

    found = ray.train.get_checkpoint()
    if found:
        unickpt.load(url_of(found), state)
    ...
    report({"loss": loss}, state, f"step_{step}")

Nothing is written to a local folder first, and nothing is uploaded by Ray. docs/integrations/ray.md
lists the differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

import unickpt
from unickpt import SaveOptions
from unickpt.errors import InvalidPath
from unickpt.types import PendingSave

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""The prefixes of unickpt's paths for PyArrow's file systems."""


def report(
    metrics: dict[str, Any],
    tree: Any,
    checkpoint_dir_name: str,
    *,
    metadata: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> PendingSave:
    """Saves a tree in the background, and reports it to Ray Train when it is committed.

    Called by all workers, as `ray.train.report`; returns when the state may change. Reports reach
    Ray in the order of their calls. An error of the save fails the training, at the latest when the
    training function returns; Ray then resumes from the checkpoint that was reported last.

    Arguments:
        metrics: as for `ray.train.report`.
        tree: as for `unickpt.save`; each worker writes its part.
        checkpoint_dir_name: the checkpoint's folder in that of the run, the same on all workers. A
            checkpoint of this name is replaced, such as one that was not reported because the job
            was killed; Ray must not know another one by it.
        metadata, options: as for `unickpt.save_async`.

    Returns:
        The pending save, if the caller needs to wait for it.

    Raises:
        ValueError: the name is not that of a folder.
        InvalidPath: the run's storage is neither local nor S3 nor Google Cloud Storage.
        UnickptError: as `unickpt.save_async`.
    """
    if checkpoint_dir_name in ("", ".", "..") or "/" in checkpoint_dir_name:
        raise ValueError(
            f"checkpoint_dir_name={checkpoint_dir_name!r}: give the name of a folder, such as "
            "'step_100'; it lies in the folder of the run"
        )
    storage = ray.train.get_context().get_storage()
    path = storage.build_checkpoint_path_from_name(checkpoint_dir_name)
    saved = Checkpoint(path, storage.storage_filesystem)
    url = url_of(saved)
    pending = unickpt.save_async(url, tree, overwrite=True, metadata=metadata, options=options)

    def when_committed(checkpoint: Checkpoint, name: str) -> Checkpoint:
        pending.result()
        return checkpoint

    ray.train.report(
        metrics,
        checkpoint=saved,
        checkpoint_dir_name=checkpoint_dir_name,
        # Ray calls the function on a thread of its own, and uploads nothing itself.
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=when_committed,
        delete_local_checkpoint_after_upload=False,
    )
    return pending


def url_of(checkpoint: Checkpoint) -> str:
    """The path or URL of a checkpoint that Ray knows, for `unickpt.load` and all else.

    Arguments:
        checkpoint: from `ray.train.get_checkpoint()` or a `Result`.

    Raises:
        InvalidPath: it is neither local nor in S3 or Google Cloud Storage.

    Example:
        >>> url_of(Checkpoint.from_directory("/runs/a/step_1"))
        '/runs/a/step_1'
    """
    kind = checkpoint.filesystem.type_name
    if kind not in _SCHEMES:
        raise InvalidPath(
            f"{checkpoint.path}: unickpt cannot write to a file system of type {kind!r}; give "
            "RunConfig(storage_path=) as a local path, or as a URL of s3:// or gs://"
        )
    return _SCHEMES[kind] + str(checkpoint.path)
