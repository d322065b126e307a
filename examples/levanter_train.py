"""levanter with its checkpoints in unickpt: levanter_train.py --config_path FILE ...

Any configuration of `levanter.main.train_lm`. A run that levanter saved goes on;
docs/integrations/levanter.md says more.
"""

import levanter.config
from levanter.main import train_lm

from unickpt.integrations.levanter import install

if __name__ == "__main__":
    install()
    levanter.config.main(train_lm.main)()
