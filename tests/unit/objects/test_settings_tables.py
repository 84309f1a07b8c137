"""What parsing lets through to the settings service is what the service can do."""

from __future__ import annotations

from typing import get_args

import pytest

from meshd.config import ConfigError, load_settings
from meshd.objects.buckets import settings
from meshwire.errors import S3Error
from meshwire.s3.bucket_settings import BucketSetting
from meshwire.s3.parse_request import RequestHead, parse_request


def admits(method: str, setting: str) -> bool:
    try:
        parse_request(RequestHead(method, "/photos", setting, {}))
    except S3Error:
        return False
    return True


@pytest.mark.parametrize("setting", get_args(BucketSetting))
def test_every_setting_that_is_let_through_is_carried_out(setting: BucketSetting) -> None:
    nothing = {"encryption", "replication", "website"}  # removed already: they are never there
    assert admits("GET", setting)
    assert admits("PUT", setting) == (setting in settings._WRITERS or setting == "acl")
    assert admits("DELETE", setting) == (setting in settings._REMOVERS or setting in nothing)
    assert not admits("POST", setting)


@pytest.mark.parametrize("days", ["-1", "soon", "1.5", "40000"])
def test_days_of_stale_uploads(days: str) -> None:
    with pytest.raises(ConfigError, match="stale-uploads"):
        load_settings({"data_dir": "/data", "stale_uploads": days}, env={})
    assert load_settings({"data_dir": "/data", "stale_uploads": "0"}, env={}).stale_upload_days == 0
    assert load_settings({"data_dir": "/data"}, env={}).stale_upload_days == 7


@pytest.mark.parametrize("seconds", ["0", "-3", "often"])
def test_the_lifecycle_interval(seconds: str) -> None:
    with pytest.raises(ConfigError, match="lifecycle-interval"):
        load_settings({"data_dir": "/data", "lifecycle_interval": seconds}, env={})
    assert load_settings({"data_dir": "/data", "lifecycle_interval": "0.5"}, env={}).lifecycle_interval == 0.5
