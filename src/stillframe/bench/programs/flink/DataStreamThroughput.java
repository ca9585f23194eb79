import org.apache.flink.api.common.accumulators.LongCounter;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.source.SourceReaderContext;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.connector.datagen.source.GeneratorFunction;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.util.Collector;

/** Page views counted by app or by user with the DataStream API. */
final class DataStreamThroughput extends Throughput {

    DataStreamThroughput(Params params) {
        super(params);
    }

    @Override
    protected StreamExecutionEnvironment build(long records, String parquet) throws Exception {
        StreamExecutionEnvironment env = settings.environment();
        if (params.keyedByNumber()) {
            DataStream<Long> users =
                    params.parquet()
                            ? ParquetViews.userIds(env, parquet)
                            : generated(env, records, new Users(params.keys), Types.LONG);
            count(users, Types.LONG);
        } else {
            DataStream<String> apps =
                    params.parquet()
                            ? ParquetViews.appIds(env, parquet)
                            : generated(env, records, new Apps(params.keys), Types.STRING);
            count(apps, Types.STRING);
        }
        return env;
    }

    private <K> DataStream<K> generated(
            StreamExecutionEnvironment env,
            long records,
            GeneratorFunction<Long, K> generator,
            TypeInformation<K> type) {
        return env.fromSource(
                        new DataGeneratorSource<>(generator, records, type),
                        WatermarkStrategy.noWatermarks(),
                        "clicks")
                .setParallelism(params.channels);
    }

    /** A record is its key: nothing else is serialized. */
    static <K> void count(DataStream<K> keys, TypeInformation<K> type) {
        keys.keyBy(key -> key, type)
                .process(new Count<K>())
                .returns(Types.TUPLE(type, Types.LONG))
                .sinkTo(new DiscardingSink<>());
    }

    @Override
    protected long checkedCount(Cluster.Run run, long records) throws Exception {
        long counted = run.accumulated("counted");
        check("the number of records counted", counted, records);
        checkSum(run.accumulated("sum"), records);
        return counted;
    }

    static final class Apps implements GeneratorFunction<Long, String> {
        private final int apps;
        private transient String[] names;

        Apps(int apps) {
            this.apps = apps;
        }

        @Override
        public void open(SourceReaderContext context) {
            names = Clicks.appNames(apps);
        }

        @Override
        public String map(Long n) {
            return names[Clicks.app(n, apps)];
        }
    }

    static final class Users implements GeneratorFunction<Long, Long> {
        private final int users;

        Users(int users) {
            this.users = users;
        }

        @Override
        public Long map(Long n) {
            return Clicks.user(n, users);
        }
    }

    static final class Count<K> extends KeyedProcessFunction<K, K, Tuple2<K, Long>> {
        private final LongCounter counted = new LongCounter();
        private final LongCounter sum = new LongCounter();
        private final Tuple2<K, Long> result = new Tuple2<>();
        private transient ValueState<Long> count;

        @Override
        public void open(OpenContext context) {
            count = getRuntimeContext().getState(new ValueStateDescriptor<>("count", Types.LONG));
            getRuntimeContext().addAccumulator("counted", counted);
            getRuntimeContext().addAccumulator("sum", sum);
        }

        @Override
        public void processElement(K key, Context context, Collector<Tuple2<K, Long>> out)
                throws Exception {
            Long before = count.value();
            long now = before == null ? 1 : before + 1;
            count.update(now);
            counted.add(1);
            sum.add(now);
            result.f0 = key;
            result.f1 = now;
            out.collect(result);
        }
    }
}
