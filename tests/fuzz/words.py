"""What the grammars are made of, for the fuzzers: words of each that a mutation may put in.

Law: data only.
"""

from __future__ import annotations

XML = """
<Delete> <Object> <Key> <VersionId> <ETag> <Quiet> <CompleteMultipartUpload> <Part> <PartNumber>
<ChecksumCRC32> <CreateBucketConfiguration> <LocationConstraint> <Error> <Code> <Message>
<ListBucketResult> <Contents> <ListVersionsResult> <Version> <DeleteMarker> <IsLatest>
<AccessControlPolicy> <Owner> <ID> <Grant> <Grantee <Permission> <URI> <Tagging> <TagSet> <Tag> <Value>
<VersioningConfiguration> <Status> <CORSConfiguration> <CORSRule> <AllowedOrigin> <AllowedMethod>
<MaxAgeSeconds> <PublicAccessBlockConfiguration> <BlockPublicAcls> <OwnershipControls> <Rule>
<ObjectOwnership> &amp; &#0; <![CDATA[ ]]> <!-- --> <?xml <!DOCTYPE xmlns= xsi:type=
""".split()

REQUEST = """
?member= ?members&prefix= start-after= x.tar/-/
GET PUT HEAD POST DELETE OPTIONS ?acl ?versions ?versionId= ?uploads ?uploadId= ?partNumber= ?list-type=2
?delete ?policy ?cors ?lifecycle ?tagging ?attributes ?prefix= &delimiter= &max-keys= &marker=
continuation-token= range: bytes= if-match: if-none-match: content-md5: x-amz-copy-source:
x-amz-copy-source-range: x-amz-checksum-crc32: x-amz-checksum-type: x-amz-trailer: x-amz-tagging:
x-amz-acl: x-amz-grant-read: x-amz-meta- x-amz-object-attributes: x-amz-content-sha256: x-amz-date:
authorization: AWS4-HMAC-SHA256 Credential= SignedHeaders= Signature= X-Amz-Algorithm= X-Amz-Credential=
X-Amz-Expires= X-Amz-Signature= AWSAccessKeyId= Expires= host: .s3.example.com transfer-encoding:
content-length:
""".split()

POLICY = """
"Version" "2012-10-17" "Statement" "Effect" "Allow" "Deny" "Principal" "NotPrincipal" "AWS" "Action"
"NotAction" "Resource" "NotResource" "Condition" "StringLike" "StringEqualsIfExists"
"ForAnyValue:StringLike" "ForAllValues:StringEquals" "IpAddress" "NumericLessThan" "DateGreaterThan"
"Bool" "Null" "ArnLike" "s3:prefix" "aws:SourceIp" "aws:SecureTransport" "${aws:username}"
"arn:aws:s3:::bucket/*" "s3:*" "Sid" "*"
""".split()

CHUNKS = [
    ";chunk-signature=",
    "\r\n",
    "0\r\n",
    "\r\n\r\n",
    "x-amz-checksum-crc32:",
    "x-amz-trailer-signature:",
]
TARS = ["ustar\x0000", "ustar  \x00", "././@PaxHeader", "path=", "size=", "mtime=", "GNU.sparse.", "0000000"]
FIELDS = ["bytes=", "%C3%BC", "GMT", "Mon, 01 Jan 2024", "T00:00:00Z", "a=1&b="]

FORMS = """
content-disposition: form-data; name=" filename=" --xyz --xyz-- key policy file acl tagging Content-Type
success_action_status success_action_redirect redirect x-amz-meta- x-amz-algorithm x-amz-credential x-amz-date
x-amz-signature AWSAccessKeyId signature x-amz-checksum-crc32 ${filename} "expiration" "conditions" "eq"
"starts-with" "content-length-range" "$key" "bucket" 2030-01-01T00:00:00Z
""".split()

EXPRESSIONS = """
key size json. json["a"] raw `a b` "/" 'x' and or not in (1, 'a') true false none == != <= >= part( slice(
folder( base( startswith( glob( 'a*b?') replace( length( number( text( hash( floor( min( max( first( if(
""".split()

VIEWS = """
"kind": "transform" "shards" "batches" "zarr" "ops": [{"op": "field": "args": {} "match": ".jpg" "suffix":
"prefix": "a/" "content_type": "count": "size": "shuffle": "split": "train" 0.5 "name": "plan": "batch":
"world": "epochs": "fields": {"ext": ["jpg"]} {"class": "prefix"} "snapshot": "follow": true "samples":
"tar" "chunk": "shard": "on_bad": "mask" null "sort": "group": "where": "format": "tfrecord" -1 1e400
9223372036854775808
""".split()

DECLARATIONS = """
"name": "input": "output": "arguments": [] "random": true "seconds": 10.0 "memory": 1073741824 "summary":
"kind": "image" "array" "bytes" "dtype": "uint8" "float32" "shape": ["h", null, 3] "layout": "hwc" "chw"
"type": "int" "float" "list" "default": null -1 1e400 9223372036854775808
""".split()

ZIPS = [
    "PK\1\2",
    "PK\3\4",
    "PK\5\6",
    "PK\6\6",
    "PK\6\7",
    "\xff\xff\xff\xff",
    "\xff\xff",
    "\x01\x00\x08\x00",
    "\x1f\x8b\x08",
    "(\xb5/\xfd",
]

DATASETS = """
"ops": [{"op": "tokenize" "field": "args": "version": "1" "seed": "shuffle": {"kind": "blocks"
"shards": 64} "tail": "drop" "on_bad": "mask" "max_bad": 0.5 "pack": "fields": ["tokens"] "length":
2048 "value": "long": "split" null "zarr_format": 3 "node_type": "array" "shape": [10, 3]
"data_type": "int16" "chunk_grid": "name": "regular" "configuration": "chunk_shape":
"chunk_key_encoding": "default" "separator": "/" "codecs": "bytes" "endian": "little"
"sharding_indexed" "index_codecs": "index_location": "start" "crc32c" "gzip" "zstd" -1 1e400
9223372036854775808
""".split()

TABLES = [
    "\n",
    "\r\n",
    "\r",
    '{"a": [{"b": [1, 2]}], "n": 7}',
    "\x93NUMPY\x01\x00",
    "PK\3\4",
    "a.npy",
    '{"a":{"dtype":"I16"',
]
IMAGES = (
    *("\x89PNG\r\n\x1a\n", "IHDR", "PLTE", "IDAT", "IEND", "tRNS", "zTXt", "iCCP", "acTL"),
    *(
        "RIFF",
        "WEBP",
        "VP8 ",
        "VP8L",
        "VP8X",
        "ANIM",
        "ANMF",
        "GIF89a",
        "NETSCAPE2.0",
        "BM",
        "II*\0",
        "MM\0*",
    ),
    *(
        "JFIF\0",
        "Exif\0\0",
        "Adobe\0",
        "\xff\xd8",
        "\xff\xd9",
        "\xff\xda",
        "\xff\xc0",
        "\xff\xc2",
        "\xff\xff",
    ),
)
