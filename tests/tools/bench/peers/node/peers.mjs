// The peers that run on Node.js, each with a function for each message.
// Arguments: which, database, file of numbers, size of a batch. The packages are in the folder BENCH_MODULES.
import { openSync, writeSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [which, connectionString, path, size] = process.argv.slice(2);
const batch = Number(size);
const require = createRequire(`${process.env.BENCH_MODULES}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);

// Ten digits and a newline for each message, written every ten milliseconds: see peers/numbers.py.
const file = openSync(path, "a");
let added = [];
const add = (n) => added.push(n);
setInterval(() => {
  if (added.length === 0) return;
  const text = added.map((n) => `${String(n).padStart(10, "0")}\n`).join("");
  added = [];
  writeSync(file, text);
}, 10);

const peers = {
  async "graphile-worker"() {
    const { run } = await load("graphile-worker");
    // A local queue and completion in batches are what its pages advise for small jobs.
    const tuned = batch > 1 ? { localQueue: { size: batch }, completeJobBatchDelay: 0, failJobBatchDelay: 0 } : {};
    await run({
      preset: { worker: { connectionString, concurrentJobs: 24, maxPoolSize: 26, ...tuned } },
      taskList: { bench: async (payload) => add(payload.n) },
    });
  },
  async "pg-boss"() {
    const { PgBoss } = await load("pg-boss");
    const boss = new PgBoss({ connectionString });
    boss.on("error", (error) => console.error(error));
    await boss.start();
    await boss.createQueue("bench");
    const options = { batchSize: batch, pollingIntervalSeconds: 0.5, burstWhenBatchFull: true };
    await boss.work("bench", options, async (jobs) => {
      for (const job of jobs) add(job.data.n);
    });
  },
  async emmett() {
    const { getPostgreSQLEventStore, postgreSQLEventStoreConsumer } = await load("@event-driven-io/emmett-postgresql");
    const store = getPostgreSQLEventStore(connectionString);
    await store.schema.migrate();
    await store.close();
    const consumer = postgreSQLEventStoreConsumer({
      connectionString,
      pulling: { batchSize: batch, pullingFrequencyInMs: 10 },
    });
    consumer.reactor({ processorId: "bench", eachMessage: (message) => add(message.data.n) });
    consumer.start();
  },
};

await peers[which]();
console.log("ready");
