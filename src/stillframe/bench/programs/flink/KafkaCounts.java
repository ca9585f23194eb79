import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.api.DataTypes;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.types.DataType;

/**
 * Page views from Kafka counted by app with the DataStream API. Flink's KafkaSource reads all that
 * is in the topic, its JSON format makes rows of the values; it is told that only the app is read.
 */
final class KafkaCounts {

    private final Params params;
    private final Settings settings;

    KafkaCounts(Params params) {
        this.params = params;
        this.settings = new Settings(params);
    }

    Result run() throws Exception {
        try (Cluster cluster = new Cluster(settings.configuration(), params.parallelism)) {
            Cluster.Run warmup = cluster.run(build(params.warmupInput));
            double startupSeconds = Cluster.secondsSinceStart(warmup.runningAtMs);
            Cluster.Run run = cluster.run(build(params.input));
            long counted = run.accumulated("counted");
            Throughput.check("the number of records counted", counted, params.inputRecords);
            return new Result(params, settings)
                    .counted(run, startupSeconds, params.inputRecords, counted)
                    .checkpoints(run.checkpoints, 0);
        }
    }

    private StreamExecutionEnvironment build(String topic) {
        StreamExecutionEnvironment env = settings.environment();
        StreamTableEnvironment tables = StreamTableEnvironment.create(env);
        createTable(tables, topic);
        // Rows in Flink's own format: nothing is converted on the way to the data stream.
        DataType row =
                DataTypes.ROW(DataTypes.FIELD("app_id", DataTypes.STRING()))
                        .bridgedTo(RowData.class);
        DataStream<RowData> views =
                tables.toDataStream(tables.sqlQuery("SELECT app_id FROM page_views"), row);
        DataStreamThroughput.count(
                views.map(view -> view.getString(0).toString(), Types.STRING), Types.STRING);
        return env;
    }

    /** Its connector is not part of Flink's wheel. */
    private void createTable(StreamTableEnvironment tables, String topic) {
        try {
            Class.forName("org.apache.flink.connector.kafka.source.KafkaSource");
        } catch (ClassNotFoundException e) {
            throw new Params.Unsupported(
                    "flink's wheel has no Kafka source: flink-sql-connector-kafka is not"
                            + " installed");
        }
        tables.executeSql(
                "CREATE TEMPORARY TABLE page_views (app_id STRING, user_id BIGINT, url STRING,"
                        + " `at` BIGINT, referrer STRING) WITH ('connector' = 'kafka',"
                        + " 'format' = 'json', 'scan.startup.mode' = 'earliest-offset',"
                        + " 'scan.bounded.mode' = 'latest-offset',"
                        + " 'properties.isolation.level' = 'read_committed',"
                        + " 'properties.max.poll.records' = '10000',"
                        + " 'properties.max.partition.fetch.bytes' = '4194304',"
                        + " 'topic' = '"
                        + topic
                        + "', 'properties.bootstrap.servers' = '"
                        + params.brokers
                        + "')");
    }
}
