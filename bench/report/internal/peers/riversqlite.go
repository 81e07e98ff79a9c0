package peers

import (
	"context"
	"database/sql"

	"github.com/mattn/go-sqlite3"
	"github.com/riverqueue/river/riverdriver/riversqlite"

	"codeq/bench/workload"
)

// riverSQLiteSubjects returns River on SQLite by go-sqlite3, with a WAL, one connection, as in
// River's documentation, and the client of riverSubjects: the drivers of both databases have the
// client's version.
func riverSQLiteSubjects() []subject {
	var all []subject
	for _, s := range sqliteLevels {
		for _, w := range []struct {
			name, driven string
			batch        int
		}{
			{"single", "Insert; 128 workers", 1},
			{"batch", "InsertManyFast of 64; 128 workers", batchSize},
		} {
			all = append(all, subject{
				Name: "riversqlite/" + s.name + "/" + w.name, Queue: "River", Driven: w.driven + ", synchronous=" + s.name,
				Keeps: s.keeps, Class: s.class, Batch: w.batch, Leases: true, Retains: true,
				open: func(ctx context.Context, dir string, _ workload.Load) (*peer, error) {
					return openRiverSQLite(ctx, dir, s.name)
				},
			})
		}
	}
	return all
}

func openRiverSQLite(ctx context.Context, dir, synchronous string) (_ *peer, err error) {
	lib, _, _ := sqlite3.Version()
	p := &peer{version: moduleVersion("github.com/riverqueue/river") + ", SQLite " + lib}
	defer closeUnless(&err, p)
	db, err := sql.Open("sqlite3", sqliteSource(dir, synchronous))
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1)
	p.onClose(db.Close)
	p.driver, err = newRiverDriver(ctx, riversqlite.New(db))
	return p, err
}
