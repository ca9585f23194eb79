import java.lang.management.ManagementFactory;
import java.util.Map;
import java.util.concurrent.TimeUnit;

import org.apache.flink.api.common.JobExecutionResult;
import org.apache.flink.api.common.JobID;
import org.apache.flink.api.common.JobStatus;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.runtime.checkpoint.CheckpointStatsSnapshot;
import org.apache.flink.runtime.execution.ExecutionState;
import org.apache.flink.runtime.executiongraph.AccessExecutionGraph;
import org.apache.flink.runtime.executiongraph.AccessExecutionJobVertex;
import org.apache.flink.runtime.executiongraph.AccessExecutionVertex;
import org.apache.flink.runtime.jobmaster.JobResult;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.runtime.minicluster.MiniClusterConfiguration;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * Flink in this process: one job manager, one task manager. Records between its subtasks are
 * serialized as everywhere, but cross no socket.
 */
public final class Cluster implements AutoCloseable {

    /** What one job did, told by Flink's own execution graph. */
    public static final class Run {
        public final double seconds;
        public final double cpuSeconds;
        public final long runningAtMs;
        public final CheckpointStatsSnapshot checkpoints;
        private final Map<String, Object> accumulators;

        Run(AccessExecutionGraph graph, Map<String, Object> accumulators, double cpuSeconds) {
            this.runningAtMs = allTasksRunningAtMs(graph);
            this.seconds = (graph.getStatusTimestamp(JobStatus.FINISHED) - runningAtMs) / 1000.0;
            this.checkpoints = graph.getCheckpointStatsSnapshot();
            this.accumulators = accumulators;
            this.cpuSeconds = cpuSeconds;
        }

        public long accumulated(String name) {
            return (Long) accumulators.get(name);
        }
    }

    private final MiniCluster cluster;

    public Cluster(Configuration configuration, int slots) throws Exception {
        cluster =
                new MiniCluster(
                        new MiniClusterConfiguration.Builder()
                                .setConfiguration(configuration)
                                .setNumTaskManagers(1)
                                .setNumSlotsPerTaskManager(slots)
                                .withRandomPorts()
                                .build());
        cluster.start();
    }

    /** Runs the job built in this environment to its end. */
    public Run run(StreamExecutionEnvironment env) throws Exception {
        long cpuBefore = cpuNanos();
        JobID id = submit(env);
        JobResult result = cluster.requestJobResult(id).get();
        long cpuNanos = cpuNanos() - cpuBefore;
        JobExecutionResult finished =
                result.toJobExecutionResult(Cluster.class.getClassLoader());
        return new Run(graph(id), finished.getAllAccumulatorResults(), cpuNanos / 1e9);
    }

    public JobID submit(StreamExecutionEnvironment env) throws Exception {
        return cluster.submitJob(env.getStreamGraph().getJobGraph()).get().getJobID();
    }

    public AccessExecutionGraph graph(JobID id) throws Exception {
        return cluster.getExecutionGraph(id).get();
    }

    /** Takes a checkpoint now; returns when it is completed. */
    public void checkpoint(JobID id) throws Exception {
        cluster.triggerCheckpoint(id).get(10, TimeUnit.MINUTES);
    }

    /** Fails with the job's failure if it has failed. */
    public void checkRunning(JobID id) throws Exception {
        AccessExecutionGraph graph = graph(id);
        if (graph.getState().isGloballyTerminalState()) {
            throw new IllegalStateException(
                    "the job is " + graph.getState(), graph.getFailureInfo().getException());
        }
    }

    public void cancel(JobID id) throws Exception {
        cluster.cancelJob(id).get();
        cluster.requestJobResult(id).get();
    }

    @Override
    public void close() throws Exception {
        cluster.close();
    }

    public static double secondsSinceStart(long atMs) {
        return (atMs - ManagementFactory.getRuntimeMXBean().getStartTime()) / 1000.0;
    }

    /** 0 while a task is not running yet. */
    static long allTasksRunningAtMs(AccessExecutionGraph graph) {
        long atMs = 0;
        for (AccessExecutionJobVertex vertex : graph.getAllVertices().values()) {
            for (AccessExecutionVertex task : vertex.getTaskVertices()) {
                long runningMs = task.getStateTimestamp(ExecutionState.RUNNING);
                if (runningMs == 0) {
                    return 0;
                }
                atMs = Math.max(atMs, runningMs);
            }
        }
        return atMs;
    }

    private static long cpuNanos() {
        return ((com.sun.management.OperatingSystemMXBean)
                        ManagementFactory.getOperatingSystemMXBean())
                .getProcessCpuTime();
    }
}
