import java.util.Arrays;
import java.util.Queue;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.ConcurrentLinkedQueue;

import org.apache.flink.api.common.accumulators.LongCounter;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichFlatMapFunction;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.source.SourceReaderContext;
import org.apache.flink.api.connector.source.lib.NumberSequenceSource.NumberSequenceSplit;
import org.apache.flink.api.connector.source.util.ratelimit.RateLimiter;
import org.apache.flink.api.connector.source.util.ratelimit.RateLimiterStrategy;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.connector.datagen.source.GeneratorFunction;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.util.Collector;

/**
 * The age of records behind the count, at a fixed rate.
 *
 * <p>A record's age counts from the time it was due by schedule, so that a source that was held up
 * does not hide it. What falls due while the job starts is worked off in the first seconds, which
 * are not measured.
 */
final class Latency {

    private static final double STARTUP_SECONDS = 2;
    private static final double WARMUP_SECONDS = 5;

    private final Params params;
    private final Settings settings;

    Latency(Params params) {
        this.params = params;
        this.settings = new Settings(params);
        settings.tune("execution.buffer-timeout.interval", params.bufferTimeoutMs + " ms");
    }

    public Result run() throws Exception {
        try (Cluster cluster = new Cluster(settings.configuration(), params.parallelism)) {
            Schedule unlimited = new Schedule(1e9, params.warmupRecords, params.parallelism, 0);
            Cluster.Run warmup = cluster.run(build(unlimited));
            double unmeasured = STARTUP_SECONDS + WARMUP_SECONDS;
            long records = Math.round(params.rate * (unmeasured + params.seconds));
            Schedule schedule =
                    new Schedule(params.rate, records, params.parallelism, unmeasured);
            Measure.SAMPLES.clear();
            Cluster.Run run = cluster.run(build(schedule));
            long counted = run.accumulated("counted");
            Throughput.check(
                    "the number of records counted",
                    counted,
                    schedule.records + (params.expectOneMore ? 1 : 0));
            return new Result(params, settings)
                    .counted(
                            run,
                            Cluster.secondsSinceStart(warmup.runningAtMs),
                            schedule.records,
                            counted)
                    .checkpoints(run.checkpoints, 0)
                    .latencies(Measure.sortedMicros());
        }
    }

    private StreamExecutionEnvironment build(Schedule schedule) {
        StreamExecutionEnvironment env = settings.environment();
        TypeInformation<Tuple2<String, Long>> click = Types.TUPLE(Types.STRING, Types.LONG);
        DataStream<Tuple2<String, Long>> clicks =
                env.fromSource(
                        new DataGeneratorSource<>(
                                new DueClicks(schedule, params.keys),
                                schedule.records,
                                new BySchedule(schedule),
                                click),
                        WatermarkStrategy.noWatermarks(),
                        "clicks");
        if (params.slowChannel) {
            clicks = clicks.map(new Slow(schedule)).returns(click);
        }
        clicks.keyBy(record -> record.f0, Types.STRING)
                .process(new Count())
                .returns(Types.TUPLE(Types.STRING, Types.LONG, Types.LONG))
                .flatMap(new Measure(schedule.measuredFromNanos))
                .returns(Types.LONG)
                .sinkTo(new DiscardingSink<>());
        return env;
    }

    /** When the records are due, in the time of System.nanoTime: all runs in one process. */
    static final class Schedule implements java.io.Serializable {
        final long startNanos = System.nanoTime();
        final long measuredFromNanos;
        final long records;
        final long recordsPerSubtask;
        final double gapNanos;

        Schedule(double rate, long records, int parallelism, double unmeasuredSeconds) {
            recordsPerSubtask = (records + parallelism - 1) / parallelism;
            this.records = recordsPerSubtask * parallelism;
            gapNanos = parallelism * 1e9 / rate;
            measuredFromNanos = startNanos + (long) (unmeasuredSeconds * 1e9);
        }

        /** A source subtask has a run of numbers; its subtasks take turns in time. */
        long dueNanos(long n) {
            long turn = n / recordsPerSubtask;
            double share = turn / (double) (records / recordsPerSubtask);
            return startNanos + (long) ((n % recordsPerSubtask + share) * gapNanos);
        }
    }

    static final class DueClicks implements GeneratorFunction<Long, Tuple2<String, Long>> {
        private final Schedule schedule;
        private final int apps;
        private transient String[] names;

        DueClicks(Schedule schedule, int apps) {
            this.schedule = schedule;
            this.apps = apps;
        }

        @Override
        public void open(SourceReaderContext context) {
            names = Clicks.appNames(apps);
        }

        @Override
        public Tuple2<String, Long> map(Long n) {
            return Tuple2.of(names[Clicks.app(n, apps)], schedule.dueNanos(n));
        }
    }

    /** Lets the generator make its next record when that is due, or at once if it is late. */
    static final class BySchedule implements RateLimiterStrategy<NumberSequenceSplit> {
        private final Schedule schedule;

        BySchedule(Schedule schedule) {
            this.schedule = schedule;
        }

        @Override
        public RateLimiter<NumberSequenceSplit> createRateLimiter(int parallelism) {
            return new RateLimiter<>() {
                private long issued;

                @Override
                public CompletionStage<Void> acquire(int records) {
                    long dueNanos = schedule.dueNanos(issued);
                    issued += records;
                    return Timer.at(dueNanos);
                }
            };
        }
    }

    /** The first subtask sleeps for half of the time in which its records come. */
    static final class Slow extends RichMapFunction<Tuple2<String, Long>, Tuple2<String, Long>> {
        private static final long SLEEP_MS = 5;

        private final long recordsPerSleep;
        private boolean isSlow;
        private long seen;

        Slow(Schedule schedule) {
            recordsPerSleep = Math.max(1, Math.round(2 * SLEEP_MS * 1e6 / schedule.gapNanos));
        }

        @Override
        public void open(OpenContext context) {
            isSlow = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask() == 0;
        }

        @Override
        public Tuple2<String, Long> map(Tuple2<String, Long> click) throws Exception {
            if (isSlow && ++seen % recordsPerSleep == 0) {
                Thread.sleep(SLEEP_MS);
            }
            return click;
        }
    }

    static final class Count
            extends KeyedProcessFunction<
                    String, Tuple2<String, Long>, Tuple3<String, Long, Long>> {
        private transient ValueState<Long> count;

        @Override
        public void open(OpenContext context) {
            count = getRuntimeContext().getState(new ValueStateDescriptor<>("count", Types.LONG));
        }

        @Override
        public void processElement(
                Tuple2<String, Long> click,
                Context context,
                Collector<Tuple3<String, Long, Long>> out)
                throws Exception {
            Long before = count.value();
            long now = before == null ? 1 : before + 1;
            count.update(now);
            out.collect(Tuple3.of(click.f0, click.f1, now));
        }
    }

    static final class Measure extends RichFlatMapFunction<Tuple3<String, Long, Long>, Long> {
        /** The ages each subtask saw, in microseconds. */
        static final Queue<long[]> SAMPLES = new ConcurrentLinkedQueue<>();

        private final LongCounter counted = new LongCounter();
        private final long fromNanos;
        private transient long[] micros;
        private transient int samples;

        Measure(long fromNanos) {
            this.fromNanos = fromNanos;
        }

        static long[] sortedMicros() {
            return SAMPLES.stream().flatMapToLong(Arrays::stream).sorted().toArray();
        }

        @Override
        public void open(OpenContext context) {
            micros = new long[1 << 16];
            getRuntimeContext().addAccumulator("counted", counted);
        }

        @Override
        public void flatMap(Tuple3<String, Long, Long> record, Collector<Long> out) {
            counted.add(1);
            if (record.f1 >= fromNanos) {
                if (samples == micros.length) {
                    micros = Arrays.copyOf(micros, 2 * samples);
                }
                micros[samples++] = (System.nanoTime() - record.f1) / 1000;
            }
        }

        @Override
        public void close() {
            SAMPLES.add(Arrays.copyOf(micros, samples));
        }
    }
}
