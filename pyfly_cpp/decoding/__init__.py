"""How to decode: `Decoding`, the one setting of Python, presets, the command line, the server and measuring."""

from pyfly_cpp.decoding.setting import AS_IN_CHAT as AS_IN_CHAT
from pyfly_cpp.decoding.setting import EXACT as EXACT
from pyfly_cpp.decoding.setting import OF_REQUEST as OF_REQUEST
from pyfly_cpp.decoding.setting import PLAIN as PLAIN
from pyfly_cpp.decoding.setting import Decoding as Decoding
from pyfly_cpp.decoding.setting import parse_settings as parse_settings
from pyfly_cpp.decoding.setting import require_repeatable as require_repeatable
from pyfly_cpp.decoding.setting import short_names as short_names
from pyfly_cpp.decoding.setting import written as written
from pyfly_cpp.decoding.setting import written_drafters as written_drafters
