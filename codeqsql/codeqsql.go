package codeqsql

import (
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"codeq"
)

// Dialect is the kind of a database.
type Dialect uint8

// The dialects.
const (
	SQLite     Dialect = iota + 1 // from 3.24
	PostgreSQL                    // from 10
	MySQL                         // from 5.7, and MariaDB from 10.2, with InnoDB
)

var dialectNames = [...]string{SQLite: "SQLite", PostgreSQL: "PostgreSQL", MySQL: "MySQL"}

// String returns the name.
func (d Dialect) String() string {
	if d.isKnown() {
		return dialectNames[d]
	}
	return fmt.Sprintf("Dialect(%d)", uint8(d))
}

func (d Dialect) isKnown() bool { return d >= SQLite && d <= MySQL }

// Options are the options of [New]. A zero field means its documented default.
type Options struct {
	// Prefix begins the names of tables and indexes: ASCII letters, digits and _, at most 30.
	// Default: "codeq_".
	Prefix string
	// Limits are those of the queue (codeq.Options.Limits), with the same defaults:
	// [Tables.Enqueue] refuses a Payload, Headers or names that exceed them. Other limits have no
	// effect here.
	Limits codeq.Limits
}

// Tables are the tables of this package in a database. [New] makes it. Its methods are safe for
// concurrent use.
type Tables struct {
	dialect      Dialect
	limits       codeq.Limits
	outbox, once string
	names        *strings.Replacer // of {outbox} and {once} in statements
}

// Execer executes a statement. It is a *sql.Tx, a *sql.Conn, or a *sql.DB, which commits each
// statement by itself.
type Execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// DB executes statements and queries. It is a *sql.DB, a *sql.Conn or a *sql.Tx.
type DB interface {
	Execer
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

var isPrefix = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,29}$`)

// New returns the tables of a dialect. It makes none: see [Tables.Migrate]. Nil opts mean all
// defaults.
//
// Errors: codeq.ErrInvalid.
func New(d Dialect, opts *Options) (*Tables, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	if !d.isKnown() {
		return nil, &codeq.InvalidError{Field: "Dialect", Value: d, Limit: "SQLite, PostgreSQL or MySQL"}
	}
	if o.Prefix == "" {
		o.Prefix = "codeq_"
	}
	if !isPrefix.MatchString(o.Prefix) {
		return nil, &codeq.InvalidError{Field: "Options.Prefix", Value: strconv.Quote(o.Prefix),
			Limit: "ASCII letters, digits and _, at most 30, no digit first"}
	}
	t := &Tables{dialect: d, outbox: o.Prefix + "outbox", once: o.Prefix + "once"}
	t.names = strings.NewReplacer("{outbox}", t.outbox, "{once}", t.once)
	for _, l := range []struct {
		name     string
		to       *int
		from, or int
	}{
		{"Payload", &t.limits.Payload, o.Limits.Payload, 1 << 20},
		{"Headers", &t.limits.Headers, o.Limits.Headers, 16 << 10},
		{"Name", &t.limits.Name, o.Limits.Name, 255},
	} {
		switch {
		case l.from < 0:
			return nil, &codeq.InvalidError{Field: "Options.Limits." + l.name, Value: l.from, Limit: "0 or more"}
		case l.from == 0:
			l.from = l.or
		}
		*l.to = l.from
	}
	return t, nil
}

// sql puts the names of the tables into a statement, and the placeholders of the dialect in place
// of each ?.
func (t *Tables) sql(statement string) string {
	statement = t.names.Replace(statement)
	if t.dialect != PostgreSQL {
		return statement
	}
	var b strings.Builder
	n := 0
	for part := range strings.SplitSeq(statement, "?") {
		if n > 0 {
			b.WriteString("$" + strconv.Itoa(n))
		}
		b.WriteString(part)
		n++
	}
	return b.String()
}

// exec executes a statement, and returns how many rows it has changed.
func (t *Tables) exec(ctx context.Context, db Execer, statement string, args ...any) (int64, error) {
	result, err := db.ExecContext(ctx, t.sql(statement), args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// each calls scan for each row of a query, as long as it returns true.
func (t *Tables) each(ctx context.Context, db DB, scan func(*sql.Rows) (more bool, err error), query string, args ...any) error {
	rows, err := db.QueryContext(ctx, t.sql(query), args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if more, err := scan(rows); err != nil || !more {
			return err
		}
	}
	return rows.Err()
}

// failed adds the failed step to an error.
func failed(what string, err *error) {
	if *err != nil {
		*err = fmt.Errorf("codeqsql: %s: %w", what, *err)
	}
}
