# The types of the public names; `__init__.py` imports each when it is used.
from forebay import collate as collate
from forebay.buffer import Buffer as Buffer
from forebay.caching.dataset import CachedDataset as CachedDataset
from forebay.caching.dataset import open_cache as open_cache
from forebay.errors import BusyError as BusyError
from forebay.errors import ChangedError as ChangedError
from forebay.errors import FailuresError as FailuresError
from forebay.errors import ForebayError as ForebayError
from forebay.errors import InputError as InputError
from forebay.errors import LedgerError as LedgerError
from forebay.errors import OptionError as OptionError
from forebay.errors import OutputError as OutputError
from forebay.errors import SampleTimeoutError as SampleTimeoutError
from forebay.errors import WorkerDiedError as WorkerDiedError
from forebay.failures import Failure as Failure
from forebay.items import from_folder as from_folder
from forebay.items import from_ids as from_ids
from forebay.items import from_table as from_table
from forebay.lengths import batch_by_length as batch_by_length
from forebay.lengths import pack_sequences as pack_sequences
from forebay.loader import DataLoader as DataLoader
from forebay.loading.sample_check import SampleCheck as SampleCheck
from forebay.mixing import MixedDataset as MixedDataset
from forebay.mixing import mix as mix
from forebay.observe.diagnosis import Diagnosis as Diagnosis
from forebay.observe.figures import Statistics as Statistics
from forebay.options import AutoWorkers as AutoWorkers
from forebay.options import Ray as Ray
from forebay.outputs.output import get_output as get_output
from forebay.outputs.tars import open_output as open_output
from forebay.packed import PackedSequence as PackedSequence
from forebay.predicting.predict import predict as predict
from forebay.runs.cache import cache as cache
from forebay.runs.index_shards import index_shards as index_shards
from forebay.runs.preprocess import preprocess as preprocess
from forebay.runs.report import PredictionReport as PredictionReport
from forebay.runs.report import Report as Report
from forebay.shards.dataset import ShardDataset as ShardDataset
from forebay.shards.dataset import open_shards as open_shards
from forebay.shards.format import register_format as register_format
from forebay.trainer import use as use

__version__: str

def __dir__() -> list[str]: ...
