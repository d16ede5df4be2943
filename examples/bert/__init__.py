"""BERT in Flax Linen: fp32 parameters, any compute dtype, the encoder's layers under one scan."""

from .config import SIZES as SIZES
from .config import BertConfig as BertConfig
from .encoder import BertEncoder as BertEncoder
from .models import BertForClassification as BertForClassification
from .models import BertForPreTraining as BertForPreTraining
