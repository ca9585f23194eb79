/** The records of all programs: record n has an app and a user, taken from splitmix64 of n. */
public final class Clicks {

    public static long bits(long n) {
        long z = n + 0x9E3779B97F4A7C15L;
        z = (z ^ (z >>> 30)) * 0xBF58476D1CE4E5B9L;
        z = (z ^ (z >>> 27)) * 0x94D049BB133111EBL;
        return z ^ (z >>> 31);
    }

    /** The high half decides about the app … */
    public static int app(long n, int apps) {
        return (int) (((bits(n) >>> 32) * apps) >>> 32);
    }

    /** … and the low half about the user, each evenly. */
    public static long user(long n, int users) {
        return ((bits(n) & 0xFFFF_FFFFL) * users) >>> 32;
    }

    /** Ready names, as a generator in a user's program would have them. */
    public static String[] appNames(int apps) {
        String[] names = new String[apps];
        for (int app = 0; app < apps; app++) {
            names[app] = "app-" + app;
        }
        return names;
    }

    /**
     * What the running counts of records 0 … records-1 add up to: 1 + 2 + … + c of a key with c
     * records. Only a count that saw every record of its key once gives this sum.
     */
    public static long sumOfRunningCounts(long records, int keys, boolean keyedByNumber) {
        long[] counts = new long[keys];
        long sum = 0;
        for (long n = 0; n < records; n++) {
            sum += ++counts[keyedByNumber ? (int) user(n, keys) : app(n, keys)];
        }
        return sum;
    }

    private Clicks() {}
}
