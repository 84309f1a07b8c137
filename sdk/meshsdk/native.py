"""Earlier path of the documents of the native API, kept for one release: see `meshsdk.client.native_api`."""

from __future__ import annotations

from meshsdk.client.native_api import BadSample, FieldInfo, FieldSchema, PlanInfo, SnapshotInfo

__all__ = ["BadSample", "FieldInfo", "FieldSchema", "PlanInfo", "SnapshotInfo"]
