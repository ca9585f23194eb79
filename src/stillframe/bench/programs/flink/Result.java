import java.util.ArrayList;
import java.util.List;
import java.util.function.ToLongFunction;

import org.apache.flink.runtime.checkpoint.AbstractCheckpointStats;
import org.apache.flink.runtime.checkpoint.CheckpointStatsSnapshot;
import org.apache.flink.runtime.checkpoint.CheckpointStatsStatus;
import org.apache.flink.runtime.checkpoint.SubtaskStateStats;
import org.apache.flink.runtime.checkpoint.TaskStateStats;
import org.apache.flink.runtime.util.EnvironmentInformation;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.JsonNode;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.node.ObjectNode;

/** The last line of a program. */
public final class Result {

    private static final ObjectMapper JSON = new ObjectMapper();

    private final ObjectNode json = JSON.createObjectNode();

    public Result(Params params, Settings settings) {
        json.put("engine", "flink");
        json.put("version", EnvironmentInformation.getVersion());
        json.put("java", System.getProperty("java.version"));
        json.put("variant", params.variant);
        json.put("workload", params.workload);
        json.putNull("checkpoints");
        json.putNull("latency_ms");
        json.set("settings", JSON.valueToTree(settings.tuned()));
    }

    public Result counted(Cluster.Run run, double startupSeconds, long records, long counted) {
        put("startup_s", rounded(startupSeconds));
        put("records", records);
        put("counted", counted);
        put("seconds", rounded(run.seconds));
        put("records_per_second", Math.round(records / run.seconds));
        put("cpu_seconds", rounded(run.cpuSeconds));
        return this;
    }

    public Result put(String name, Object value) {
        json.set(name, JSON.valueToTree(value));
        return this;
    }

    /** Flink's own figures of its checkpoints, those after the first {@code skipped}. */
    public Result checkpoints(CheckpointStatsSnapshot snapshot, int skipped) {
        List<AbstractCheckpointStats> all = withStatus(snapshot, CheckpointStatsStatus.COMPLETED);
        if (all.size() <= skipped) {
            return this;
        }
        List<AbstractCheckpointStats> completed = all.subList(skipped, all.size());
        long failed = withStatus(snapshot, CheckpointStatsStatus.FAILED).size();
        long[] durations = sorted(completed, AbstractCheckpointStats::getEndToEndDuration);
        ObjectNode told = json.putObject("checkpoints");
        told.put("completed", completed.size());
        told.put("failed", failed);
        // Flink counts as failed, too, what it did not begin: not all tasks ran yet, or any more.
        told.put("not_begun", snapshot.getCounts().getNumberOfFailedCheckpoints() - failed);
        told.put("p50_ms", percentile(durations, 0.5));
        told.put("p99_ms", percentile(durations, 0.99));
        told.put("max_ms", durations[durations.length - 1]);
        told.put(
                "bytes_p50",
                percentile(sorted(completed, AbstractCheckpointStats::getCheckpointedSize), 0.5));
        return parts(completed);
    }

    /** Medians over the checkpoints; of each the subtask that took longest. */
    private Result parts(List<AbstractCheckpointStats> completed) {
        ObjectNode parts = json.putObject("parts_ms");
        parts.put("start_delay", part(completed, SubtaskStateStats::getCheckpointStartDelay));
        parts.put("alignment", part(completed, SubtaskStateStats::getAlignmentDuration));
        parts.put("sync", part(completed, SubtaskStateStats::getSyncCheckpointDuration));
        parts.put("async", part(completed, SubtaskStateStats::getAsyncCheckpointDuration));
        return this;
    }

    private static long part(
            List<AbstractCheckpointStats> completed, ToLongFunction<SubtaskStateStats> part) {
        return percentile(sorted(completed, checkpoint -> longest(checkpoint, part)), 0.5);
    }

    private static long longest(
            AbstractCheckpointStats checkpoint, ToLongFunction<SubtaskStateStats> part) {
        long longest = 0;
        for (TaskStateStats task : checkpoint.getAllTaskStateStats()) {
            for (SubtaskStateStats subtask : task.getSubtaskStats()) {
                longest = Math.max(longest, subtask == null ? 0 : part.applyAsLong(subtask));
            }
        }
        return longest;
    }

    /** Newest last. */
    private static List<AbstractCheckpointStats> withStatus(
            CheckpointStatsSnapshot snapshot, CheckpointStatsStatus status) {
        List<AbstractCheckpointStats> found = new ArrayList<>();
        if (snapshot != null) {
            for (AbstractCheckpointStats stats : snapshot.getHistory().getCheckpoints()) {
                if (stats.getStatus() == status) {
                    found.add(0, stats);
                }
            }
        }
        return found;
    }

    public Result latencies(long[] sortedMicros) {
        ObjectNode told = json.putObject("latency_ms");
        told.put("p50", percentile(sortedMicros, 0.5) / 1000.0);
        told.put("p99", percentile(sortedMicros, 0.99) / 1000.0);
        told.put("p999", percentile(sortedMicros, 0.999) / 1000.0);
        told.put("max", sortedMicros[sortedMicros.length - 1] / 1000.0);
        told.put("samples", sortedMicros.length);
        return this;
    }

    public void print() {
        System.out.println("RESULT " + json);
    }

    private static <T> long[] sorted(List<T> values, ToLongFunction<T> of) {
        return values.stream().mapToLong(of).sorted().toArray();
    }

    private static long percentile(long[] sorted, double share) {
        return sorted[(int) Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
    }

    private static double rounded(double seconds) {
        return Math.round(seconds * 1000) / 1000.0;
    }
}
