from tests.support.request_path import files_of_a_request
from tests.support.tiny_tokenizers import write_byte_level


def test_x(tmp_path, monkeypatch):
    m = write_byte_level(tmp_path)
    fs = files_of_a_request(str(m), {"prompt": [5, 6, 7, 8, 9], "max_tokens": 4}, monkeypatch)
    print("\n".join(fs))
    print(len(fs))
