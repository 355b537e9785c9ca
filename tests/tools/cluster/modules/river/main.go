// River with a function for each job: a peer of `make bench`. Arguments: database, file of numbers, most workers.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

type message struct {
	N int64 `json:"n"`
}

func (message) Kind() string { return "bench" }

// numbers is the file that the ledger reads: ten digits and a newline for each message, written every ten milliseconds.
type numbers struct {
	mutex sync.Mutex
	added []byte
}

func (n *numbers) add(number int64) {
	n.mutex.Lock()
	n.added = fmt.Appendf(n.added, "%010d\n", number)
	n.mutex.Unlock()
}

func (n *numbers) writeForEver(path string) {
	file, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	must(err)
	for range time.Tick(10 * time.Millisecond) {
		n.mutex.Lock()
		added := n.added
		n.added = nil
		n.mutex.Unlock()
		_, err := file.Write(added)
		must(err)
	}
}

type worker struct {
	river.WorkerDefaults[message]
	numbers *numbers
}

func (w *worker) Work(_ context.Context, job *river.Job[message]) error {
	w.numbers.add(job.Args.N)
	return nil
}

func main() {
	ctx := context.Background()
	most, err := strconv.Atoi(os.Args[3])
	must(err)
	pool, err := pgxpool.New(ctx, os.Args[1])
	must(err)
	driver := riverpgxv5.New(pool)
	migrator, err := rivermigrate.New(driver, nil)
	must(err)
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	must(err)
	noted := &numbers{}
	go noted.writeForEver(os.Args[2])
	workers := river.NewWorkers()
	river.AddWorker(workers, &worker{numbers: noted})
	client, err := river.NewClient(driver, &river.Config{
		FetchCooldown:     2 * time.Millisecond,
		FetchPollInterval: 20 * time.Millisecond,
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: most}},
		Workers:           workers,
	})
	must(err)
	must(client.Start(ctx))
	fmt.Println("ready")
	select {}
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
