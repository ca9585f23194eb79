import java.util.Arrays;
import org.apache.spark.sql.ForeachWriter;
import org.apache.spark.sql.Row;

/**
 * The last operator of the real-time query: takes now - created of every row it is given.
 *
 * <p>The job is local, so its tasks and the driver share one JVM and the ages are read from there.
 */
public final class AgeWriter extends ForeachWriter<Row> {
  private static long[] agesUs = new long[1 << 20];
  private static int taken;
  private static long fromUs;
  private static long untilUs;
  private static long seen;

  /** Take only records that were due in this time. */
  public static synchronized void measure(long from, long until) {
    fromUs = from;
    untilUs = until;
    taken = 0;
    seen = 0;
  }

  public static synchronized long seen() {
    return seen;
  }

  public static synchronized int taken() {
    return taken;
  }

  /** The age in ms that this share of the records did not exceed. */
  public static synchronized double percentileMs(double share) {
    long[] sorted = Arrays.copyOf(agesUs, taken);
    Arrays.sort(sorted);
    int at = (int) Math.min(taken - 1L, (long) Math.ceil(share * taken) - 1);
    return sorted[Math.max(0, at)] / 1000.0;
  }

  private static synchronized void add(long createdUs, long nowUs) {
    seen++;
    if (createdUs < fromUs || createdUs >= untilUs) {
      return;
    }
    if (taken == agesUs.length) {
      agesUs = Arrays.copyOf(agesUs, taken * 2);
    }
    agesUs[taken++] = nowUs - createdUs;
  }

  @Override
  public boolean open(long partitionId, long epochId) {
    return true;
  }

  @Override
  public void process(Row row) {
    add(row.getLong(2), ScheduledSource.nowUs());
  }

  @Override
  public void close(Throwable error) {}
}
