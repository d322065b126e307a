"""Data loaders that resume after a restart, on more and on fewer data-parallel ranks.

Each is an object that a training loop iterates or fills, and that is saved and loaded as a leaf of
the tree. Every sample comes exactly once, whatever the numbers of ranks were:

- `Shards`: a fixed number of shards, each with a loader of its own (torchdata's StatefulDataLoader,
  Grain, torchtitan's, Hugging Face `datasets`), which are dealt to the ranks;
- `Samples`: the samples of a map-style dataset, which ranks take in turns;
- `Buffer`: samples that were read and not used yet, such as a packing loader's token buffer.

`Ranks` says which data-parallel rank a process is, and which of equal ones saves. `Sections` is for
loaders of your own: a value of `PerProcess` that a loading process reads only in part.
"""

from unickpt.extend import Sections
from unickpt.plugins.data.buffer import Buffer
from unickpt.plugins.data.ranks import Ranks
from unickpt.plugins.data.remaining_samples import Positions
from unickpt.plugins.data.samples import Samples
from unickpt.plugins.data.shards import Shards

__all__ = ["Buffer", "Positions", "Ranks", "Samples", "Sections", "Shards"]
