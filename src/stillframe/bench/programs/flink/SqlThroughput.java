import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.Optional;
import java.util.Set;

import org.apache.flink.api.common.accumulators.LongCounter;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichFlatMapFunction;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.source.SourceReaderContext;
import org.apache.flink.configuration.ConfigOption;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.connector.datagen.source.GeneratorFunction;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.datastream.DataStreamSink;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.table.api.bridge.java.StreamStatementSet;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;
import org.apache.flink.table.catalog.GenericInMemoryCatalog;
import org.apache.flink.table.connector.ChangelogMode;
import org.apache.flink.table.connector.ProviderContext;
import org.apache.flink.table.connector.sink.DataStreamSinkProvider;
import org.apache.flink.table.connector.sink.DynamicTableSink;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.factories.DynamicTableSinkFactory;
import org.apache.flink.table.factories.Factory;
import org.apache.flink.table.runtime.typeutils.InternalTypeInfo;
import org.apache.flink.table.types.logical.BigIntType;
import org.apache.flink.table.types.logical.LogicalType;
import org.apache.flink.table.types.logical.RowType;
import org.apache.flink.table.types.logical.VarCharType;
import org.apache.flink.types.RowKind;
import org.apache.flink.util.Collector;

/** Page views counted by app or by user with one SQL statement, with or without mini-batches. */
final class SqlThroughput extends Throughput {

    private final boolean miniBatch;

    SqlThroughput(Params params) {
        super(params);
        miniBatch = params.variant.equals("sql-minibatch");
        if (miniBatch) {
            settings.tune("table.exec.mini-batch.enabled", "true")
                    .tune("table.exec.mini-batch.allow-latency", "500 ms")
                    .tune("table.exec.mini-batch.size", "50000")
                    .tune("table.optimizer.agg-phase-strategy", "TWO_PHASE");
        }
    }

    @Override
    protected StreamExecutionEnvironment build(long records, String parquet) throws Exception {
        StreamExecutionEnvironment env = settings.environment();
        StreamTableEnvironment tables = StreamTableEnvironment.create(env);
        String key = key();
        String type = params.keyedByNumber() ? "BIGINT" : "STRING";
        if (params.parquet()) {
            ParquetViews.createTable(tables, parquet);
        } else {
            tables.createTemporaryView("page_views", generated(env, records));
        }
        tables.registerCatalog("checked", new CheckedSinks(summing()));
        tables.executeSql(
                String.format(
                        "CREATE TABLE checked.`default`.counts (%s %s, clicks BIGINT)", key, type));
        StreamStatementSet statements = tables.createStatementSet();
        statements.addInsertSql(
                String.format(
                        "INSERT INTO checked.`default`.counts"
                                + " SELECT %1$s, COUNT(*) FROM page_views GROUP BY %1$s",
                        key));
        statements.attachAsDataStream();
        return env;
    }

    private RichFlatMapFunction<RowData, Long> summing() {
        return miniBatch
                ? new LastCounts(params.keys, params.keyedByNumber())
                : new RunningCounts();
    }

    private DataStream<RowData> generated(StreamExecutionEnvironment env, long records) {
        LogicalType type =
                params.keyedByNumber()
                        ? new BigIntType(false)
                        : new VarCharType(false, VarCharType.MAX_LENGTH);
        // Rows in the format of Flink's table runtime: nothing is converted on the way.
        InternalTypeInfo<RowData> row =
                InternalTypeInfo.of(RowType.of(new LogicalType[] {type}, new String[] {key()}));
        return env.fromSource(
                        new DataGeneratorSource<>(
                                new Rows(params.keys, params.keyedByNumber()), records, row),
                        WatermarkStrategy.noWatermarks(),
                        "clicks")
                .setParallelism(params.channels);
    }

    @Override
    protected long checkedCount(Cluster.Run run, long records) throws Exception {
        if (miniBatch) {
            check("the sum of the last counts", run.accumulated("counted"), records);
        } else {
            check("the number of changes", run.accumulated("changes"), records);
            checkSum(run.accumulated("sum"), records);
        }
        return records;
    }

    static final class Rows implements GeneratorFunction<Long, RowData> {
        private final int keys;
        private final boolean byNumber;
        private transient GenericRowData row;
        private transient StringData[] names;

        Rows(int keys, boolean byNumber) {
            this.keys = keys;
            this.byNumber = byNumber;
        }

        @Override
        public void open(SourceReaderContext context) {
            row = new GenericRowData(1);
            names =
                    Arrays.stream(Clicks.appNames(byNumber ? 0 : keys))
                            .map(StringData::fromString)
                            .toArray(StringData[]::new);
        }

        @Override
        public RowData map(Long n) {
            row.setField(0, byNumber ? (Object) Clicks.user(n, keys) : names[Clicks.app(n, keys)]);
            return row;
        }
    }

    /** Its tables discard what they get, as those of the blackhole connector, but sum it first. */
    static final class CheckedSinks extends GenericInMemoryCatalog {
        private final RichFlatMapFunction<RowData, Long> summing;

        CheckedSinks(RichFlatMapFunction<RowData, Long> summing) {
            super("checked");
            this.summing = summing;
        }

        @Override
        public Optional<Factory> getFactory() {
            return Optional.of(new CheckedSinkFactory(summing));
        }
    }

    static final class CheckedSinkFactory implements DynamicTableSinkFactory {
        private final RichFlatMapFunction<RowData, Long> summing;

        CheckedSinkFactory(RichFlatMapFunction<RowData, Long> summing) {
            this.summing = summing;
        }

        @Override
        public DynamicTableSink createDynamicTableSink(Context context) {
            return new CheckedSink(summing);
        }

        @Override
        public String factoryIdentifier() {
            return "checked";
        }

        @Override
        public Set<ConfigOption<?>> requiredOptions() {
            return Set.of();
        }

        @Override
        public Set<ConfigOption<?>> optionalOptions() {
            return Set.of();
        }
    }

    static final class CheckedSink implements DynamicTableSink {
        private final RichFlatMapFunction<RowData, Long> summing;

        CheckedSink(RichFlatMapFunction<RowData, Long> summing) {
            this.summing = summing;
        }

        /** As the blackhole connector: the row before an update need not be made. */
        @Override
        public ChangelogMode getChangelogMode(ChangelogMode requested) {
            ChangelogMode.Builder mode = ChangelogMode.newBuilder();
            for (RowKind kind : requested.getContainedKinds()) {
                if (kind != RowKind.UPDATE_BEFORE) {
                    mode.addContainedKind(kind);
                }
            }
            return mode.build();
        }

        @Override
        public SinkRuntimeProvider getSinkRuntimeProvider(Context context) {
            return new DataStreamSinkProvider() {
                @Override
                public DataStreamSink<?> consumeDataStream(
                        ProviderContext provider, DataStream<RowData> changes) {
                    return changes.flatMap(summing)
                            .returns(Types.LONG)
                            .sinkTo(new DiscardingSink<>());
                }
            };
        }

        @Override
        public DynamicTableSink copy() {
            return new CheckedSink(summing);
        }

        @Override
        public String asSummaryString() {
            return "checked";
        }
    }

    /** One change for each record: two sums say everything. */
    static final class RunningCounts extends RichFlatMapFunction<RowData, Long> {
        private final LongCounter changes = new LongCounter();
        private final LongCounter sum = new LongCounter();

        @Override
        public void open(OpenContext context) {
            getRuntimeContext().addAccumulator("changes", changes);
            getRuntimeContext().addAccumulator("sum", sum);
        }

        @Override
        public void flatMap(RowData row, Collector<Long> out) {
            changes.add(1);
            sum.add(row.getLong(1));
        }
    }

    /** One change for each key of a mini-batch: the sum of what each key has gained. */
    static final class LastCounts extends RichFlatMapFunction<RowData, Long> {
        private final LongCounter counted = new LongCounter();
        private final int keys;
        private final boolean byNumber;
        private transient long[] ofNumbers;
        private transient Map<String, Long> ofNames;

        LastCounts(int keys, boolean byNumber) {
            this.keys = keys;
            this.byNumber = byNumber;
        }

        @Override
        public void open(OpenContext context) {
            getRuntimeContext().addAccumulator("counted", counted);
            ofNumbers = new long[byNumber ? keys : 0];
            ofNames = new HashMap<>();
        }

        @Override
        public void flatMap(RowData row, Collector<Long> out) {
            long now = row.getLong(1);
            long before = byNumber ? replaced((int) row.getLong(0), now) : replaced(row, now);
            counted.add(now - before);
        }

        private long replaced(int user, long now) {
            long before = ofNumbers[user];
            ofNumbers[user] = now;
            return before;
        }

        private long replaced(RowData row, long now) {
            Long before = ofNames.put(row.getString(0).toString(), now);
            return before == null ? 0 : before;
        }
    }
}
