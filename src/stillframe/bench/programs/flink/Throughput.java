import java.io.File;
import java.util.Arrays;

import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * Two warm-up jobs and a measured one in one process.
 *
 * <p>The first warm-up is as long as the harness says and mostly compiles; the second runs for half
 * of the measured time and says how many records the measured job has to have.
 */
abstract class Throughput {

    protected final Params params;
    protected final Settings settings;

    protected Throughput(Params params) {
        this.params = params;
        this.settings = new Settings(params);
    }

    /** Builds the job: {@code records} of the generator, or all rows of the Parquet files. */
    protected abstract StreamExecutionEnvironment build(long records, String parquet)
            throws Exception;

    /** Fails unless the accumulators of the run say that all records were counted once. */
    protected abstract long checkedCount(Cluster.Run run, long records) throws Exception;

    public final Result run() throws Exception {
        int slots = Math.max(params.parallelism, params.channels);
        try (Cluster cluster = new Cluster(settings.configuration(), slots)) {
            Cluster.Run warmup = cluster.run(build(params.warmupRecords, firstFile()));
            double startupSeconds = Cluster.secondsSinceStart(warmup.runningAtMs);
            long records = params.inputRecords;
            if (!params.parquet()) {
                long trial = records(params.warmupRecords, warmup, params.seconds / 2);
                records = records(trial, cluster.run(build(trial, null)), params.seconds);
            }
            Cluster.Run run = cluster.run(build(records, params.input));
            long counted = checkedCount(run, records + (params.expectOneMore ? 1 : 0));
            return new Result(params, settings)
                    .counted(run, startupSeconds, records, counted)
                    .checkpoints(run.checkpoints, 0);
        }
    }

    private static long records(long ranRecords, Cluster.Run ran, double seconds) {
        return Math.max(1, Math.round(ranRecords / ran.seconds * seconds));
    }

    private String firstFile() {
        if (!params.parquet()) {
            return null;
        }
        File[] files = new File(params.input).listFiles((d, name) -> name.endsWith(".parquet"));
        Arrays.sort(files);
        return files[0].getPath();
    }

    /** Only counts that saw every record of their key once, in their state, give this sum. */
    protected final void checkSum(long sum, long records) throws Exception {
        long expected =
                params.parquet()
                        ? ParquetViews.sumOfRunningCounts(params.input, key())
                        : Clicks.sumOfRunningCounts(records, params.keys, params.keyedByNumber());
        check("the sum of all running counts", sum, expected);
    }

    protected final String key() {
        return params.keyedByNumber() ? "user_id" : "app_id";
    }

    static void check(String what, long seen, long expected) {
        if (seen != expected) {
            throw new IllegalStateException(what + " is " + seen + ", not " + expected);
        }
    }
}
