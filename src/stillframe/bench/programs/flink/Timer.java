import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;

/** Says when it is time, for rate limiters of Flink's generator source. */
final class Timer {

    private static final CompletionStage<Void> NOW = CompletableFuture.completedFuture(null);

    private static final ScheduledExecutorService TIMERS =
            Executors.newScheduledThreadPool(
                    2,
                    task -> {
                        Thread thread = new Thread(task, "timer");
                        thread.setDaemon(true);
                        return thread;
                    });

    /** Completed at that time of System.nanoTime, or at once if that has passed. */
    static CompletionStage<Void> at(long nanos) {
        long waitNanos = nanos - System.nanoTime();
        if (waitNanos <= 0) {
            return NOW;
        }
        CompletableFuture<Void> due = new CompletableFuture<>();
        TIMERS.schedule(() -> due.complete(null), waitNanos, TimeUnit.NANOSECONDS);
        return due;
    }

    private Timer() {}
}
