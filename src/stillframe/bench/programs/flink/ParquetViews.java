import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.api.DataTypes;
import org.apache.flink.table.api.EnvironmentSettings;
import org.apache.flink.table.api.Table;
import org.apache.flink.table.api.TableEnvironment;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.types.DataType;
import org.apache.flink.types.Row;
import org.apache.flink.util.CloseableIterator;

/**
 * The Parquet files of the harness, read by Flink's file source with its vectorized Parquet reader.
 * Only the column that is asked for is read.
 */
final class ParquetViews {

    /** Creates the table {@code page_views}; its reader is not part of Flink's wheel. */
    static void createTable(TableEnvironment tables, String path) {
        try {
            Class.forName("org.apache.flink.formats.parquet.ParquetFileFormatFactory");
        } catch (ClassNotFoundException e) {
            throw new Params.Unsupported(
                    "flink's wheel has no Parquet reader: flink-sql-parquet is not installed");
        }
        tables.executeSql(
                "CREATE TEMPORARY TABLE page_views (app_id STRING, user_id BIGINT, url STRING)"
                        + " WITH ('connector' = 'filesystem', 'format' = 'parquet',"
                        + " 'path' = 'file://"
                        + path
                        + "')");
    }

    static DataStream<String> appIds(StreamExecutionEnvironment env, String path) {
        return column(env, path, "app_id", DataTypes.STRING())
                .map(row -> row.getString(0).toString(), Types.STRING);
    }

    static DataStream<Long> userIds(StreamExecutionEnvironment env, String path) {
        return column(env, path, "user_id", DataTypes.BIGINT())
                .map(row -> row.getLong(0), Types.LONG);
    }

    /** Rows in Flink's own format: nothing is converted on the way to the data stream. */
    private static DataStream<RowData> column(
            StreamExecutionEnvironment env, String path, String name, DataType type) {
        StreamTableEnvironment tables = StreamTableEnvironment.create(env);
        createTable(tables, path);
        DataType row = DataTypes.ROW(DataTypes.FIELD(name, type)).bridgedTo(RowData.class);
        return tables.toDataStream(tables.sqlQuery("SELECT " + name + " FROM page_views"), row);
    }

    /** As {@link Clicks#sumOfRunningCounts}, of these files, by a batch job without any state. */
    static long sumOfRunningCounts(String path, String key) throws Exception {
        TableEnvironment tables = TableEnvironment.create(EnvironmentSettings.inBatchMode());
        createTable(tables, path);
        Table sum =
                tables.sqlQuery(
                        "SELECT SUM(clicks * (clicks + 1) / 2) FROM (SELECT COUNT(*) AS clicks"
                                + " FROM page_views GROUP BY "
                                + key
                                + ")");
        try (CloseableIterator<Row> rows = sum.execute().collect()) {
            return ((Number) rows.next().getField(0)).longValue();
        }
    }

    private ParquetViews() {}
}
