SELECT {schema}.current_timeline()
