from unickpt.plugins.data import Buffer as Buffer
from unickpt.plugins.data import Positions as Positions
from unickpt.plugins.data import Ranks as Ranks
from unickpt.plugins.data import Samples as Samples
from unickpt.plugins.data import Sections as Sections
from unickpt.plugins.data import Shards as Shards
