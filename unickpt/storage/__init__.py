"""Where bytes live: any storage that TensorStore has a driver for, as folders with a database.

`paths.resolve` finds the location that a path or URL names, by the `schemes` that are registered.
A `Location`, or a `LocalLocation` on a local disk, is a folder: what is in it, how it is locked and
made durable, and its OCDBT database. `kvstore` is the way to TensorStore; `ocdbt`, `ocdbt_nodes`
and `local_database` read an untrusted database in bounded memory. `errors` are the failures.
"""
