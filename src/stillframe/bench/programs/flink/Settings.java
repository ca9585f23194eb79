import java.io.File;
import java.util.LinkedHashMap;
import java.util.Map;

import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/** Flink's configuration for a run, in the keys of Flink's documentation. */
public final class Settings {

    /** The tuning, to be shown in the report; where files go and the like is left out. */
    private final Map<String, String> tuned = new LinkedHashMap<>();

    private final Configuration configuration = new Configuration();

    /** What the harness wants otherwise than here; it has the last word. */
    private final Map<String, String> asked;

    public Settings(Params params) {
        asked = params.settings;
        tune("parallelism.default", String.valueOf(params.parallelism));
        tune("pipeline.object-reuse", "true");
        // No type may fall back to Kryo unnoticed.
        tune("pipeline.generic-types", "false");
        tune("pipeline.auto-watermark-interval", "0 ms");
        set("restart-strategy.type", "none");
        set("io.tmp.dirs", directory(params, "tmp"));
        set("web.checkpoints.history", "10000");
        memory();
        backend(params);
        checkpoints(params);
        asked.forEach(this::tune);
    }

    private void memory() {
        tune("taskmanager.memory.managed.size", "1 gb");
        tune("taskmanager.memory.network.min", "128 mb");
        tune("taskmanager.memory.network.max", "128 mb");
    }

    private void backend(Params params) {
        tune("state.backend.type", params.rocksdb() ? "rocksdb" : "hashmap");
        if (params.rocksdb()) {
            set("state.backend.rocksdb.localdir", directory(params, "rocksdb"));
            tune("state.backend.rocksdb.predefined-options", "FLASH_SSD_OPTIMIZED");
            tune("state.backend.rocksdb.use-bloom-filter", "true");
        }
    }

    private void checkpoints(Params params) {
        set("execution.checkpointing.storage", "filesystem");
        set("execution.checkpointing.dir", "file://" + directory(params, "checkpoints"));
        tune("execution.checkpointing.mode", "EXACTLY_ONCE");
        boolean incremental = params.rocksdb() && params.incremental;
        tune("execution.checkpointing.incremental", String.valueOf(incremental));
        boolean unaligned = params.mode.equals("unaligned");
        tune("execution.checkpointing.unaligned.enabled", String.valueOf(unaligned));
        // Otherwise a bounded job idles until one more periodic checkpoint before it finishes.
        tune("execution.checkpointing.checkpoints-after-tasks-finish", "false");
        if (params.checkpointIntervalMs > 0) {
            tune("execution.checkpointing.interval", params.checkpointIntervalMs + " ms");
        }
    }

    public Settings tune(String key, String otherwise) {
        String value = asked.getOrDefault(key, otherwise);
        tuned.put(key, value);
        return set(key, value);
    }

    private Settings set(String key, String value) {
        configuration.setString(key, value);
        return this;
    }

    public Settings leaveOut(String key) {
        tuned.remove(key);
        configuration.removeKey(key);
        return this;
    }

    public Configuration configuration() {
        return configuration;
    }

    public Map<String, String> tuned() {
        return tuned;
    }

    public StreamExecutionEnvironment environment() {
        return StreamExecutionEnvironment.getExecutionEnvironment(configuration);
    }

    private static String directory(Params params, String name) {
        File directory = new File(params.directory, name).getAbsoluteFile();
        directory.mkdirs();
        return directory.getPath();
    }
}
