/**
 * The Flink programs of `stillframe bench`.
 *
 * <p>{@code java @java.options -cp CLASSES:JARS Bench '{"workload": "strings", "variant":
 * "datastream", …}'} runs warm-up jobs and a measured one on a Flink cluster in this process (one
 * task manager with as many slots as the parallelism), and prints {@code RESULT {…}} as its last
 * line. Exit code 3: Flink has no such combination.
 */
public final class Bench {

    private static final int UNSUPPORTED = 3;

    public static void main(String[] args) throws Exception {
        try {
            run(new Params(args[0])).print();
        } catch (Params.Unsupported e) {
            System.err.println(e.getMessage());
            System.exit(UNSUPPORTED);
        }
        // Threads of the cluster are daemons, those of RocksDB and of the file system are not.
        System.exit(0);
    }

    private static Result run(Params params) throws Exception {
        switch (params.workload) {
            case "strings":
            case "integers":
            case "growth":
                return params.variant.startsWith("sql")
                        ? new SqlThroughput(params).run()
                        : new DataStreamThroughput(params).run();
            case "latency":
                return new Latency(params).run();
            case "kafka_counts":
                return new KafkaCounts(params).run();
            case "state":
                return new StateSize(params).run();
            default:
                throw new Params.Unsupported("flink has no program for " + params.workload);
        }
    }
}
