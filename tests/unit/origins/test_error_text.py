"""What an operator is told of an origin's failure: the reason, not the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from meshd.origins.client.obstore_origin import ObstoreOrigin, failure_reason
from meshd.origins.client.origin_api import OriginDownError, OriginRefusedError
from meshd.origins.client.origin_pool import open_origin
from meshwire.origin import parse_origin

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "Generic S3 error: Error performing GET http://10.0.0.1:9000/b/k-in 3.s in 368.003435ms"
RETRIED = ", after 4 retries, max_retries: 4, retry_timeout: 8s "
STATUS = " - Server returned non-2xx status code: "
SENDING = " - HTTP error: error sending request"
SLOW = "<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"


def debug(inner: str) -> str:
    uri = "uri: Some(\n    http://10.0.0.1:9000/b/k?X-Amz-Signature=5ecre7,\n)"
    return f"\n\nDebug source:\nGeneric {{ {uri}, inner: Http(HttpError {{ {inner} }}) }}"


AT = "10.0.0.1:9000"
SAID = {
    HEAD + RETRIED + STATUS + "503 Busy: " + SLOW: "503 Busy: SlowDown, Reduce your rate.",
    HEAD + STATUS + "500 No: <html>no</html>": "500 No: <html>no</html>",
    HEAD + " - Received redirect without LOCATION": "Received redirect without LOCATION",
    HEAD + SENDING + debug("kind: Timeout, source: TimedOut"): f"{AT}: no answer in time",
    HEAD + RETRIED + SENDING + debug('kind: Connect, Os { message: "Refused" }'): f"{AT}: Refused",
    HEAD + RETRIED + SENDING + debug('Custom { error: "failed to lookup" }'): f"{AT}: failed to lookup",
    HEAD
    + RETRIED
    + SENDING
    + debug("InvalidCertificate(\n  Expired,\n)"): f"{AT}: InvalidCertificate: Expired",
    HEAD + RETRIED + SENDING + debug("kind: Unheard"): "HTTP error: error sending request",
    "Is a directory (os error 21)": "Is a directory (os error 21)",
    HEAD + STATUS + "500 No: " + "x" * 1000: ("500 No: " + "x" * 1000)[:160],
}


@pytest.mark.parametrize(("said", "told"), SAID.items(), ids=range(len(SAID)))
def test_the_reason_is_told_in_few_words(said: str, told: str) -> None:
    assert failure_reason(said) == told


def told(error: BaseException) -> Any:
    return ObstoreOrigin("b", None, sorted_pages=True)._translate_error(error, "k")


def test_a_machine_without_keys_of_its_own_is_told_how_to_give_some() -> None:
    """The client asks the metadata service of a cloud for keys where it was given none."""
    asked = debug("kind: Timeout, source: TimedOut").replace("10.0.0.1:9000/b/k", "169.254.169.254/latest")
    found = told(GenericError(HEAD + SENDING + asked))
    assert isinstance(found, OriginDownError)
    assert "has no credentials, and this machine provides none (169.254.169.254: no answer" in str(found)
    assert "source.secretRef" in str(found)
    assert "no credentials" not in str(told(GenericError(HEAD + SENDING + debug("kind: Timeout"))))


def coded(status: str, code: str) -> str:
    return f"{HEAD}{STATUS}{status}: <Error><Code>{code}</Code></Error>"


def test_a_clock_that_is_wrong_is_not_wrong_credentials() -> None:
    found = told(PermissionDeniedError(coded("403 Forbidden", "RequestTimeTooSkewed")))
    assert isinstance(found, OriginRefusedError)
    assert "RequestTimeTooSkewed" in str(found)
    assert "set this node's clock" in str(found)
    assert "credentials" not in str(found)


def test_credentials_that_ran_out_are_refused_whatever_the_status() -> None:
    found = told(GenericError(coded("400 Bad Request", "ExpiredToken")))
    assert isinstance(found, OriginRefusedError)
    assert "(ExpiredToken): check its credentials" in str(found)
    assert isinstance(told(GenericError(coded("403 Forbidden", "Odd"))), OriginRefusedError)  # of a listing
    assert isinstance(told(GenericError(coded("400 Bad Request", "Odd"))), OriginDownError)


@pytest.mark.parametrize("page", ["in " + "9" * 60_000, "in 1s, after 1 retr" * 3000])
def test_a_page_of_any_length_costs_nothing(page: str) -> None:
    """What an origin answers is its own: no search in it takes the square of its length."""
    assert failure_reason(page) == page[:160]


def test_a_folder_that_the_node_lacks_is_named(tmp_path: Path) -> None:
    described = parse_origin({"url": f"file://{tmp_path}/my%20scans"})
    with pytest.raises(OriginRefusedError, match=r"no folder /.*/my scans on this node"):
        open_origin("scans", described, tmp_path)
    (tmp_path / "my scans").mkdir()
    open_origin("scans", described, tmp_path)
