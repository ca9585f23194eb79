"""What the programs ask of Kafka to check themselves."""

from confluent_kafka import Consumer, KafkaError, TopicPartition

_ANSWER_SECONDS_MAX = 30.0


def consumer(brokers, **settings):
    return Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": "bench",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "log_level": 0,
            **settings,
        }
    )


def partitions_of(reader, topic):
    found = reader.list_topics(topic, _ANSWER_SECONDS_MAX).topics[topic].partitions
    return [TopicPartition(topic, number, 0) for number in found]


def number_of_offsets(brokers, topic):
    """How many records a topic has that nobody has written to in a transaction."""
    reader = consumer(brokers)
    ends = (
        reader.get_watermark_offsets(each, _ANSWER_SECONDS_MAX)
        for each in partitions_of(reader, topic)
    )
    number = sum(end - begin for begin, end in ends)
    reader.close()
    return number


def number_visible(brokers, topic):
    """How many records a reader with read_committed sees."""
    reader = consumer(brokers, **{"isolation.level": "read_committed"})
    partitions = partitions_of(reader, topic)
    reader.assign(partitions)
    number, ended = 0, set()
    while len(ended) < len(partitions):
        for message in reader.consume(10_000, 0.1):
            if message.error() is None:
                number += 1
            elif message.error().code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
            else:
                raise SystemExit(str(message.error()))
    reader.close()
    return number
