import java.util.LinkedHashMap;
import java.util.Map;

import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.JsonNode;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;

/** What the harness asks for. Keys that are missing or null have the default named here. */
public final class Params {

    /** A combination that Flink does not have; its message is the sentence the report shows. */
    public static final class Unsupported extends RuntimeException {
        public Unsupported(String message) {
            super(message);
        }
    }

    private static final long MINIMUM_WARMUP_RECORDS = 200_000;

    public final String workload;
    public final String variant;
    public final String source;
    public final String input;
    public final String warmupInput;
    public final long inputRecords;
    public final String brokers;
    public final String backend;
    public final int parallelism;
    /** 0: no checkpoints. */
    public final long checkpointIntervalMs;
    public final String mode;
    public final boolean incremental;
    public final double seconds;
    public final long warmupRecords;
    public final int keys;
    public final long rate;
    public final long bufferTimeoutMs;
    public final boolean slowChannel;
    public final long stateBytes;
    public final int channels;
    public final String directory;

    /** Of Flink, to try others than this benchmark's. */
    public final Map<String, String> settings = new LinkedHashMap<>();

    /** For a test of the checks: the program expects one record more than there is. */
    public final boolean expectOneMore;

    private final JsonNode json;

    public Params(String text) throws Exception {
        json = new ObjectMapper().readTree(text);
        workload = text("workload", "strings");
        variant = text("variant", "datastream");
        source = text("source", "generator");
        input = text("input", "");
        warmupInput = text("warmup_input", "");
        brokers = text("brokers", "");
        inputRecords = number("input_records", 0);
        backend = text("backend", "heap");
        parallelism = (int) number("parallelism", 2);
        checkpointIntervalMs = number("checkpoint_interval_ms", 0);
        mode = text("mode", "aligned");
        incremental = json.path("incremental").asBoolean(true);
        seconds = json.path("seconds").asDouble(20);
        warmupRecords = Math.max(MINIMUM_WARMUP_RECORDS, number("warmup_records", 0));
        keys = (int) number("keys", workload.equals("integers") ? 1_000_000 : 1_000);
        rate = number("rate", 10_000);
        bufferTimeoutMs = number("buffer_timeout_ms", 100);
        slowChannel = json.path("slow_channel").asBoolean(false);
        stateBytes = number("state_bytes", 100_000_000);
        channels = (int) number("channels", parallelism);
        directory = text("directory", System.getProperty("java.io.tmpdir"));
        expectOneMore = json.path("expect_one_more").asBoolean(false);
        json.path("settings")
                .fields()
                .forEachRemaining(each -> settings.put(each.getKey(), each.getValue().asText()));
        if (mode.equals("stop-the-world")) {
            throw new Unsupported("flink has no stop-the-world checkpoints");
        }
    }

    public boolean rocksdb() {
        return backend.equals("rocksdb");
    }

    public boolean parquet() {
        return source.equals("parquet");
    }

    /** Whether records are keyed by the number of a user, not by the name of an app. */
    public boolean keyedByNumber() {
        return workload.equals("integers");
    }

    private String text(String name, String otherwise) {
        return json.hasNonNull(name) ? json.get(name).asText() : otherwise;
    }

    private long number(String name, long otherwise) {
        return json.hasNonNull(name) ? json.get(name).asLong() : otherwise;
    }
}
