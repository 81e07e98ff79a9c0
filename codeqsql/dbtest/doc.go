// Package dbtest tests package codeqsql with databases: SQLite, and servers of PostgreSQL and
// MariaDB, which the tests start in a temporary directory, without a network, as user nobody if
// they run as root. On Debian:
//
//	apt-get install --no-install-recommends postgresql mariadb-server-core
//
// Without a server, its tests are skipped, unless the environment has CODEQ_DATABASES=required:
// then they fail.
//
// It is a module of its own, so that programs that use codeqsql need no driver but theirs.
package dbtest
