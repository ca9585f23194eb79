"""The queries of the benchmark 'language', in plain PySpark: the same for both engines, but
for what Spark cannot do."""

FIELDS = "app_id string, user_id long, url string, at long, referrer string"
PRICES = "at timestamp, app_id string, price decimal(12,2)"
VIEWS = "app_id string, user_id long, url string"
WORDS_A_LINE = 8
COUNTED_EACH = {"words": WORDS_A_LINE}
"""How often a record is counted, where that is not once."""


def json_counts(reader, path):
    views = reader.text(path).selectExpr(f"from_json(value, '{FIELDS}') AS view")
    return views.groupBy("view.app_id").count()


def words(reader, path):
    return (
        reader.text(path).selectExpr("explode(split(value, ' ')) AS word").groupBy("word").count()
    )


def decimals(reader, path):
    from pyspark.sql.functions import count, sum, window

    prices = reader.schema(PRICES).parquet(path)
    return prices.groupBy(window("at", "1 minute"), "app_id").agg(
        sum("price").alias("total"), count("*").alias("count")
    )


def distinct(reader, path):
    from pyspark.sql.functions import count_distinct

    return apps_by_the_minute(reader, path, count_distinct("app_id"))


def approximately_distinct(reader, path):
    """As `distinct`, which Spark refuses on a stream."""
    from pyspark.sql.functions import approx_count_distinct

    return apps_by_the_minute(reader, path, approx_count_distinct("app_id"))


def apps_by_the_minute(reader, path, number):
    from pyspark.sql.functions import count, window

    prices = reader.schema(PRICES).parquet(path)
    return prices.groupBy(window("at", "1 minute")).agg(
        number.alias("apps"), count("*").alias("count")
    )


def evaluated(reader, path):
    views = reader.schema(VIEWS).parquet(path)
    host = "substring_index(parse_url(url, 'HOST'), '.', 1)"
    page = "conv(regexp_extract(url, '/p/([0-9]+)', 1), 10, 16)"
    day = "date_format(timestamp_seconds(user_id), 'EEE')"
    made = views.selectExpr(f"initcap({host}) AS host", f"{page} AS page", f"{day} AS day")
    return made.groupBy("host", "day").agg({"page": "max", "*": "count"})


QUERIES = {
    "json_counts": json_counts,
    "words": words,
    "decimals": decimals,
    "distinct": distinct,
    "evaluated": evaluated,
}
SPARK_S_QUERIES = {**QUERIES, "distinct": approximately_distinct}
