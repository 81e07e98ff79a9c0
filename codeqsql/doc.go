// Package codeqsql joins tasks and the transactions of an application's own SQL database: SQLite,
// PostgreSQL, MySQL and MariaDB, through database/sql.
//
// [Tables.Enqueue] writes a task into a table, the outbox, in the application's transaction: it
// exists if that commits, and a [Relay] moves it into the queue. [Tables.Once] makes the writes of
// a handler happen once, however often its task is tried.
//
//	tables, err := codeqsql.New(codeqsql.PostgreSQL, nil)
//	...
//	err = tables.Migrate(ctx, db)
//	...
//	relay, err := tables.NewRelay(db, q, nil)
//	...
//	go relay.Run(ctx)
//
//	tx, err := db.BeginTx(ctx, nil)
//	...                                   // the application's writes
//	err = tables.Enqueue(ctx, tx, task)
//	...
//	err = tx.Commit()
//	relay.Wake()
//
// # What holds
//
// A row is produced with an idempotency key, [KeyFor] long, and deleted when the queue has
// acknowledged it. So a task is produced exactly once, though relay, queue and database are killed
// at any moment, and though several relays work on one database at a time: they need no lock, and
// the key ends their duplicates. A row that was first sent too long ago to rely on its key may have
// been produced: it is not sent again, but set aside and reported ([ErrStuck]).
//
// Tasks of a Group are produced in the order of their rows, whatever fails, if their transactions
// followed each other. One that began later and was committed earlier has no place before or after
// the other: rows have their numbers from before the commit. No row is skipped for that, since a
// relay remembers no position: it takes the lowest rows that there are, and deletes them.
//
// A task that the queue refuses for good is set aside with the reason, and those behind it go on;
// one that cannot be produced for now holds up its group only.
//
// # SQLite
//
// SQLite has one writer at a time. Set a busy timeout, and have transactions begin as writers: one
// that reads first fails at its first write if another connection, such as the relay's, has written
// since. For modernc.org/sqlite:
//
//	file:app.db?_txlock=immediate&_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)
package codeqsql
