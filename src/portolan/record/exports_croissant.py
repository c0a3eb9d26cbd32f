"""Croissant 1.1 description of the training data: shards with digests, mixture, order."""

from collections.abc import Mapping, Sequence
from typing import Any

from portolan.record.seal_body import SealedRun

CROISSANT_FILE = "croissant.json"
_SHARD_FIELDS = {
    "path": "sc:Text",
    "cell": "sc:Text",
    "bytes": "sc:Integer",
    "tokens": "sc:Integer",
    "sha256": "sc:Text",
    "licence": "sc:Text",
}
# The context that the specification prescribes, and one prefix for what it has no words for.
_CONTEXT: Mapping[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "arrayShape": "cr:arrayShape",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "containedIn": "cr:containedIn",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "description": {"@container": "@language"},
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isArray": "cr:isArray",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "name": {"@container": "@language"},
    "parentField": "cr:parentField",
    "path": "cr:path",
    "portolan": "urn:portolan:croissant:",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}


def describe_data(
    manifest: Mapping[str, Any], runs: Sequence[SealedRun], published: str
) -> dict[str, Any]:
    """Croissant document of a sealed data manifest.

    The shards are named by digest, whether or not they may be passed on; the record set repeats
    them as a table. Mixture and order of each run are an extension under `portolan:`.
    """
    shards = manifest["shards"]
    return {
        "@context": dict(_CONTEXT),
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": manifest["name"],
        "description": f"Training tokens of {manifest['name']}: {len(shards)} shards, "
        f"{sum(shard['tokens'] for shard in shards)} tokens, digest {manifest['digest']}.",
        "citeAs": f"{manifest['name']}, token store {manifest['digest']}",
        "datePublished": published[:10],
        "license": sorted({shard["licence"] for shard in shards}),
        "url": f"urn:portolan:store:{manifest['digest']}",
        "version": "1.0.0",
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": shard["path"],
                "name": shard["path"],
                "contentUrl": shard["path"],
                "contentSize": f"{shard['bytes']} B",
                "encodingFormat": "application/vnd.apache.arrow.file",
                "sha256": shard["sha256"],
            }
            for shard in shards
        ],
        "recordSet": [_shard_table(shards)],
        "portolan:tokenizer": manifest["tokenizer"],
        "portolan:mixture": [
            {"portolan:run": name, "portolan:digest": digest}
            for name, digest in sorted(manifest["mixtures"].items())
        ],
        "portolan:order": [
            {
                "portolan:run": run.name,
                "portolan:firstStep": order.first_step,
                "portolan:digest": order.digest,
            }
            for run in runs
            for order in run.orders
        ],
    }


def _shard_table(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "@type": "cr:RecordSet",
        "@id": "shards",
        "name": "shards",
        "description": "One row a token shard.",
        "key": {"@id": "shards/path"},
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"shards/{name}",
                "name": f"shards/{name}",
                "dataType": kind,
            }
            for name, kind in _SHARD_FIELDS.items()
        ],
        "data": [{f"shards/{name}": shard[name] for name in _SHARD_FIELDS} for shard in shards],
    }
