import java.util.concurrent.CompletionStage;
import java.util.concurrent.atomic.AtomicLong;

import org.apache.flink.api.common.JobID;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.PrimitiveArrayTypeInfo;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.source.lib.NumberSequenceSource.NumberSequenceSplit;
import org.apache.flink.api.connector.source.util.ratelimit.RateLimiter;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.runtime.checkpoint.AbstractCheckpointStats;
import org.apache.flink.runtime.checkpoint.CheckpointStatsSnapshot;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.util.Collector;

/**
 * The duration of a checkpoint against the size of the state.
 *
 * <p>Every key has a value state of 1,000 incompressible bytes. A source makes each key once, as
 * fast as it goes, and then comes by all of them again and again: one in a hundred of the keys each
 * second where checkpoints are incremental, one in ten otherwise. When all keys are there,
 * checkpoints are asked for one after the other, one each second at most; the first of them, which
 * holds all that was filled in, is not counted.
 */
final class StateSize {

    private static final int PAYLOAD_BYTES = 1000;
    private static final double SHARE_CHANGED_INCREMENTAL = 0.01;
    private static final double SHARE_CHANGED_FULL = 0.1;
    private static final int CHECKPOINTS_MIN = 3;
    private static final long CHECKPOINT_GAP_NANOS = 1_000_000_000L;

    /** How many records have reached the state. */
    private static final AtomicLong KEPT = new AtomicLong();

    private final Params params;
    private final Settings settings;
    private final long keys;
    private final double changesPerSecond;

    StateSize(Params params) {
        if (params.incremental && !params.rocksdb()) {
            throw new Params.Unsupported("flink's heap state has no incremental checkpoints");
        }
        this.params = params;
        this.settings = new Settings(params).leaveOut("execution.checkpointing.interval");
        keys = Math.max(1, params.stateBytes / PAYLOAD_BYTES);
        changesPerSecond =
                keys * (params.incremental ? SHARE_CHANGED_INCREMENTAL : SHARE_CHANGED_FULL);
    }

    public Result run() throws Exception {
        try (Cluster cluster = new Cluster(settings.configuration(), params.parallelism)) {
            JobID id = cluster.submit(build());
            while (KEPT.get() < keys) {
                cluster.checkRunning(id);
                Thread.sleep(10);
            }
            double startupSeconds =
                    Cluster.secondsSinceStart(Cluster.allTasksRunningAtMs(cluster.graph(id)));
            double seconds = takeCheckpoints(cluster, id);
            CheckpointStatsSnapshot checkpoints = cluster.graph(id).getCheckpointStatsSnapshot();
            cluster.cancel(id);
            return new Result(params, settings)
                    .put("startup_s", startupSeconds)
                    .put("records", KEPT.get())
                    .put("counted", keys)
                    .put("seconds", seconds)
                    .put("state_bytes", checkedStateBytes(checkpoints))
                    .checkpoints(checkpoints, 1);
        }
    }

    private double takeCheckpoints(Cluster cluster, JobID id) throws Exception {
        cluster.checkpoint(id);
        long startNanos = System.nanoTime();
        long untilNanos = startNanos + (long) (params.seconds * 1e9);
        for (int taken = 0; taken < CHECKPOINTS_MIN || System.nanoTime() < untilNanos; taken++) {
            long nextNanos = System.nanoTime() + CHECKPOINT_GAP_NANOS;
            cluster.checkpoint(id);
            Thread.sleep(Math.max(0, (nextNanos - System.nanoTime()) / 1_000_000));
        }
        return (System.nanoTime() - startNanos) / 1e9;
    }

    /** Of the last checkpoint. Random bytes cannot be compressed: less of them were lost. */
    private long checkedStateBytes(CheckpointStatsSnapshot checkpoints) {
        AbstractCheckpointStats last = checkpoints.getHistory().getLatestCompletedCheckpoint();
        long least = (keys + (params.expectOneMore ? keys : 0)) * PAYLOAD_BYTES;
        if (last.getStateSize() < least) {
            throw new IllegalStateException(
                    "the last checkpoint has " + last.getStateSize() + " bytes, not " + least);
        }
        return last.getStateSize();
    }

    private StreamExecutionEnvironment build() {
        StreamExecutionEnvironment env = settings.environment();
        long keys = this.keys;
        double changesPerSecond = this.changesPerSecond;
        env.fromSource(
                        new DataGeneratorSource<>(
                                n -> n % keys,
                                Long.MAX_VALUE,
                                parallelism -> new FillThenChange(keys, changesPerSecond),
                                Types.LONG),
                        WatermarkStrategy.noWatermarks(),
                        "keys")
                .setParallelism(1)
                .keyBy(key -> key, Types.LONG)
                .process(new Keep())
                .sinkTo(new DiscardingSink<>());
        return env;
    }

    /** The first records at once, the others at a fixed rate. */
    static final class FillThenChange implements RateLimiter<NumberSequenceSplit> {
        private final long unlimited;
        private final double gapNanos;
        private long issued;
        private long limitedFromNanos;

        FillThenChange(long unlimited, double perSecond) {
            this.unlimited = unlimited;
            this.gapNanos = 1e9 / perSecond;
        }

        @Override
        public CompletionStage<Void> acquire(int records) {
            issued += records;
            if (issued <= unlimited) {
                return Timer.at(System.nanoTime());
            }
            long nowNanos = System.nanoTime();
            if (limitedFromNanos == 0) {
                limitedFromNanos = nowNanos;
            }
            return Timer.at(limitedFromNanos + (long) ((issued - unlimited) * gapNanos));
        }
    }

    static final class Keep extends KeyedProcessFunction<Long, Long, Long> {
        private transient ValueState<byte[]> payload;
        private transient java.util.Random random;

        @Override
        public void open(OpenContext context) {
            payload =
                    getRuntimeContext()
                            .getState(
                                    new ValueStateDescriptor<>(
                                            "payload",
                                            PrimitiveArrayTypeInfo.BYTE_PRIMITIVE_ARRAY_TYPE_INFO));
            random = new java.util.Random(1);
        }

        @Override
        public void processElement(Long key, Context context, Collector<Long> out)
                throws Exception {
            byte[] bytes = new byte[PAYLOAD_BYTES];
            random.nextBytes(bytes);
            payload.update(bytes);
            KEPT.incrementAndGet();
        }
    }
}
