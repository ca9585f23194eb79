import java.util.Arrays;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.locks.LockSupport;
import java.util.stream.Collectors;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.PartitionOffset;
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeMode;
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeRead;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Records by schedule: record n is due at start + n / rate, and that is its `created`.
 *
 * <p>Spark's own rate source gives out the records of a whole second at a time and is refused by
 * real-time mode. This one serves both modes: a micro-batch takes what is due when it begins, a
 * real-time reader waits for each record. The due time and not the time of making is the record's
 * age, so that a stall of the engine is not hidden.
 */
public final class ScheduledSource implements TableProvider {
  static final StructType SCHEMA =
      new StructType().add("app", DataTypes.StringType).add("created_us", DataTypes.LongType);
  private static final int APPS = 1000;

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    return SCHEMA;
  }

  @Override
  public Table getTable(StructType schema, Transform[] parts, Map<String, String> properties) {
    return new ScheduledTable();
  }

  static final class ScheduledTable implements SupportsRead {
    @Override
    public String name() {
      return "scheduled";
    }

    @Override
    public StructType schema() {
      return SCHEMA;
    }

    @Override
    public Set<TableCapability> capabilities() {
      return Set.of(TableCapability.MICRO_BATCH_READ);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      Schedule schedule =
          new Schedule(
              options.getLong("startUs", 0),
              options.getLong("rate", 0),
              options.getInt("partitions", 1));
      return () -> new ScheduledScan(schedule);
    }
  }

  static final class ScheduledScan implements Scan {
    private final Schedule schedule;

    ScheduledScan(Schedule schedule) {
      this.schedule = schedule;
    }

    @Override
    public StructType readSchema() {
      return SCHEMA;
    }

    @Override
    public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
      return new ScheduledStream(schedule);
    }
  }

  /** When which record is due; partition p has the records p, p + partitions, and so on. */
  record Schedule(long startUs, long rate, int partitions) implements java.io.Serializable {
    long dueUs(int partition, long index) {
      return startUs + (index * partitions + partition) * 1_000_000L / rate;
    }

    /** How many records of the partition are due by then. */
    long dueBy(int partition, long nowUs) {
      long all = Math.max(0, (nowUs - startUs) * rate / 1_000_000L);
      return (all + partitions - 1 - partition) / partitions;
    }
  }

  static long nowUs() {
    java.time.Instant now = java.time.Instant.now();
    return now.getEpochSecond() * 1_000_000L + now.getNano() / 1000;
  }

  /** How many records each partition has given out; as JSON, [5,4]. */
  static final class Counts extends Offset {
    final long[] counts;

    Counts(long[] counts) {
      this.counts = counts;
    }

    static Counts parse(String json) {
      String inner = json.substring(1, json.length() - 1);
      return new Counts(Arrays.stream(inner.split(",")).mapToLong(Long::parseLong).toArray());
    }

    @Override
    public String json() {
      return Arrays.stream(counts).mapToObj(Long::toString).collect(Collectors.joining(",", "[", "]"));
    }
  }

  record PartitionCount(int partition, long count) implements PartitionOffset {}

  record Slice(int partition, long from, long until) implements InputPartition {}

  static final class ScheduledStream implements MicroBatchStream, SupportsRealTimeMode {
    private final Schedule schedule;

    ScheduledStream(Schedule schedule) {
      this.schedule = schedule;
    }

    @Override
    public Offset initialOffset() {
      return new Counts(new long[schedule.partitions()]);
    }

    @Override
    public Offset latestOffset() {
      long nowUs = nowUs();
      long[] due = new long[schedule.partitions()];
      Arrays.setAll(due, partition -> schedule.dueBy(partition, nowUs));
      return new Counts(due);
    }

    @Override
    public InputPartition[] planInputPartitions(Offset start, Offset end) {
      return slices(((Counts) start).counts, ((Counts) end).counts);
    }

    @Override
    public InputPartition[] planInputPartitions(Offset start) {
      long[] forever = new long[schedule.partitions()];
      Arrays.fill(forever, Long.MAX_VALUE);
      return slices(((Counts) start).counts, forever);
    }

    private static InputPartition[] slices(long[] from, long[] until) {
      InputPartition[] slices = new InputPartition[from.length];
      Arrays.setAll(slices, p -> new Slice(p, from[p], until[p]));
      return slices;
    }

    @Override
    public Offset mergeOffsets(PartitionOffset[] offsets) {
      long[] counts = new long[schedule.partitions()];
      for (PartitionOffset offset : offsets) {
        PartitionCount one = (PartitionCount) offset;
        counts[one.partition()] = one.count();
      }
      return new Counts(counts);
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      return new Readers(schedule);
    }

    @Override
    public Offset deserializeOffset(String json) {
      return Counts.parse(json);
    }

    @Override
    public void commit(Offset end) {}

    @Override
    public void stop() {}
  }

  record Readers(Schedule schedule) implements PartitionReaderFactory {
    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      return new Reader(schedule, (Slice) partition);
    }
  }

  static final class Reader implements SupportsRealTimeRead<InternalRow> {
    private static final UTF8String[] NAMES = new UTF8String[APPS];

    static {
      Arrays.setAll(NAMES, app -> UTF8String.fromString("app-" + app));
    }

    private final Schedule schedule;
    private final Slice slice;
    private long index; // Of the record after the current one.

    Reader(Schedule schedule, Slice slice) {
      this.schedule = schedule;
      this.slice = slice;
      this.index = slice.from();
    }

    @Override
    public boolean next() {
      if (index >= slice.until()) {
        return false;
      }
      index++;
      return true;
    }

    @Override
    public RecordStatus nextWithTimeout(Long startTimeMs, Long timeoutMs) {
      long dueUs = schedule.dueUs(slice.partition(), index);
      long deadlineUs = nowUs() + timeoutMs * 1000;
      for (long nowUs = nowUs(); nowUs < dueUs; nowUs = nowUs()) {
        if (nowUs >= deadlineUs) {
          return RecordStatus.newStatusWithoutArrivalTime(false);
        }
        LockSupport.parkNanos(Math.min(dueUs, deadlineUs) * 1000 - nowUs * 1000);
      }
      index++;
      return RecordStatus.newStatusWithArrivalTimeMs(dueUs / 1000);
    }

    @Override
    public InternalRow get() {
      long record = (index - 1) * schedule.partitions() + slice.partition();
      long mixed = splitmix64(record);
      int app = (int) (((mixed >>> 32) * APPS) >>> 32);
      return new GenericInternalRow(
          new Object[] {NAMES[app], schedule.dueUs(slice.partition(), index - 1)});
    }

    @Override
    public PartitionOffset getOffset() {
      return new PartitionCount(slice.partition(), index);
    }

    @Override
    public void close() {}

    private static long splitmix64(long number) {
      long z = number + 0x9E3779B97F4A7C15L;
      z = (z ^ (z >>> 30)) * 0xBF58476D1CE4E5B9L;
      z = (z ^ (z >>> 27)) * 0x94D049BB133111EBL;
      return z ^ (z >>> 31);
    }
  }
}
